"""What `LLM` does with prompts that become vectors, labels and scores."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from octavo.core.errors import OctavoError
from octavo.core.info import ModelInfo
from octavo.core.pooling import PooledOutput, PoolingParams
from octavo.core.request import GenerateRequest
from octavo.engine.loop import EngineLoop
from octavo.text.pooling import Pair, PoolingPreparer, pooled_output
from octavo.text.prepare import Prompt
from octavo.text.scoring import ScorePlan, plan_scores
from octavo.text.tokenizer import Tokenizer


class PoolingDriver:
    """Prepares requests and drives a loop until they have ended."""

    def __init__(self, tokenizer: Tokenizer, info: ModelInfo) -> None:
        self.preparer = PoolingPreparer(tokenizer, info)
        self._ids = itertools.count()

    def prepare(
        self, prompt: Prompt | Pair, params: PoolingParams, truncate: int | None = None, priority: int = 0
    ) -> GenerateRequest:
        request_id = f"pool-{next(self._ids)}"
        return self.preparer.prepare(
            prompt, params, request_id=request_id, truncate=truncate, priority=priority, param="prompt"
        )

    def plan_scores(self, pairs: Sequence[Pair], truncate: int | None) -> ScorePlan:
        return plan_scores(pairs, self.preparer, lambda prompt, params: self.prepare(prompt, params, truncate))

    def run(self, core: EngineLoop, requests: Sequence[GenerateRequest]) -> list[PooledOutput]:
        """The results in the requests' order; whatever interrupts it aborts what is left.

        Raises:
            InvalidRequestError, PoolingFailedError: the first that could not be computed.
        """
        done: dict[str, PooledOutput] = {}
        failed: OctavoError | None = None
        try:
            for request in requests:
                core.add(request)
            wanted = {request.id for request in requests}
            while wanted and failed is None:
                for delta in core.step():
                    if delta.id in wanted and delta.finish is not None:
                        wanted.discard(delta.id)
                        try:
                            done[delta.id] = pooled_output(delta)
                        except OctavoError as error:
                            failed = failed or error
        finally:
            for request in requests:
                core.abort(request.id)
            while core.busy:
                core.step()
        if failed is not None:
            raise failed
        return [done[request.id] for request in requests]
