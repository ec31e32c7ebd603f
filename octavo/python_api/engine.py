"""`LLMEngine`: the engine in this process, for scripts that add requests and step it themselves."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Self

from octavo.core.info import ModelInfo
from octavo.core.output import RequestOutput, TokenDelta
from octavo.core.params import SamplingParams
from octavo.core.stats import EngineStats
from octavo.python_api.engine_args import EngineArgs
from octavo.python_api.inputs import refuse, tokenization
from octavo.python_api.local import LocalEngine
from octavo.python_api.tokenizer import ScriptTokenizer
from octavo.text.detokenize.assembler import RequestAssembler
from octavo.text.prompts.prompt import Prompt


class LLMEngine:
    """Made by `from_engine_args`. Example:

    >>> engine = LLMEngine.from_engine_args(EngineArgs("smollm2"))
    >>> engine.add_request("0", "Hello", SamplingParams(max_tokens=8))
    >>> while engine.has_unfinished_requests():
    ...     for output in engine.step():
    ...         print(output.outputs[0].text)
    """

    def __init__(self, engine: LocalEngine) -> None:
        self._engine = engine
        self._open: dict[str, RequestAssembler] = {}

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> Self:
        """Load the model. Raises the same errors as `LLM`."""
        return cls(LocalEngine(**vars(engine_args)))

    @property
    def info(self) -> ModelInfo:
        return self._engine.info

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams,
        *,
        lora_request: Any = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
    ) -> str:
        """Queue one request and return its id. `step` returns its output, as `params.output_kind` requires.

        Raises:
            InvalidRequestError: it can't be served, or its id belongs to an unfinished request.
        """
        refuse(trace_headers=trace_headers)
        (asked,) = self._engine.feature_options(1, lora_request=lora_request)
        options = tokenization(tokenization_kwargs) | {"options": asked}
        assembler = self._engine.open(prompt, params.clone(), request_id=request_id, priority=priority, **options)
        self._engine.core.loop.add(assembler.request)
        self._open[request_id] = assembler
        return request_id

    def step(self) -> list[RequestOutput]:
        """Run one step for all scheduled requests. Return their new output."""
        outputs = []
        for delta in self._engine.core.loop.step():
            outputs += self._push(delta)
        return outputs

    def abort_request(self, request_ids: str | Iterable[str]) -> None:
        """Abort requests; `step` returns no more output for them."""
        for request_id in [request_ids] if isinstance(request_ids, str) else list(request_ids):
            if self._open.pop(request_id, None) is not None:
                self._engine.core.loop.abort(request_id)

    def has_unfinished_requests(self) -> bool:
        return bool(self._open)

    def get_num_unfinished_requests(self) -> int:
        return len(self._open)

    def get_tokenizer(self) -> ScriptTokenizer:
        return self._engine.script_tokenizer()

    def reset_prefix_cache(self) -> bool:
        """Like `LLM.reset_prefix_cache`."""
        self._engine.core.loop.reset_prefix_cache()
        return True

    def stats(self) -> EngineStats:
        return self._engine.core.stats()

    def close(self) -> None:
        """Free the model and its memory."""
        self._engine.close()

    def _push(self, delta: TokenDelta) -> list[RequestOutput]:
        assembler = self._open.get(delta.id)
        if assembler is None:
            return []
        output = assembler.push(delta)
        for index in assembler.aborts:
            self._engine.core.loop.abort(delta.id, index)
        if assembler.finished:
            del self._open[delta.id]
        return [] if output is None else [output]
