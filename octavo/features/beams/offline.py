"""`BeamSearchMethods`: `LLM.beam_search`."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

from octavo.core.errors import InvalidRequestError
from octavo.core.output import RequestOutput
from octavo.features.beams.api import BeamSearchOutput, BeamSearchParams
from octavo.python_api.inputs import as_list
from octavo.python_api.local import LocalEngine
from octavo.python_api.progress import UseTqdm
from octavo.text.detokenize.assembler import RequestAssembler
from octavo.text.prompts.prompt import Prompt


class BeamSearchMethods:
    """Mixin of `LLM`."""

    _engine: LocalEngine

    @abstractmethod
    def _complete(
        self, assemblers: list[RequestAssembler], use_tqdm: UseTqdm, at_once: int | None = None
    ) -> list[RequestOutput]: ...

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        lora_request: Any = None,
        use_tqdm: UseTqdm = False,
        concurrency_limit: int | None = None,
    ) -> list[BeamSearchOutput]:
        """Return the most likely continuations of each prompt, best first.

        Args:
            concurrency_limit: prompts to search for at a time; None leaves it to the scheduler.
        """
        if concurrency_limit is not None and concurrency_limit < 1:
            raise InvalidRequestError(
                "concurrency_limit must be at least 1, or None.", param="concurrency_limit", value=concurrency_limit
            )
        sampling = params.sampling()
        prompts = as_list(prompts)
        given = self._engine.feature_options(len(prompts), lora_request=lora_request)
        pairs = zip(prompts, given, strict=True)
        assemblers = [self._engine.open(prompt, sampling, options=options) for prompt, options in pairs]
        found = self._complete(assemblers, use_tqdm, at_once=concurrency_limit)
        return [params.output(output, self._engine.tokenizer) for output in found]


METHODS = BeamSearchMethods
