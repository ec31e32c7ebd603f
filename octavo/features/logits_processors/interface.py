"""The interface for users: `LogitsProcessor` for batches, `AdapterLogitsProcessor` for one request at a time."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from octavo.core.params import SamplingParams

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from octavo.text.tokenizers.tokenizer import Tokenizer

RequestProcessor = Callable[..., "Tensor | None"]
"""`(prompt_ids, output_ids, logits) -> logits` or `(output_ids, logits) -> logits`, for logits [vocab] float32.

Returning None means that the logits were changed in place.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessorContext:
    """The engine's facts for a processor's constructor.

    Attributes:
        vocab_size: columns of the logits.
        device: the logits' device.
        model: the model's folder or file.
        max_num_seqs: most rows at once.
        load_tokenizer: returns the model's tokenizer, loaded at the first call.
    """

    vocab_size: int
    device: torch.device
    model: str
    max_num_seqs: int
    load_tokenizer: Callable[[], Tokenizer]


@dataclass(slots=True, eq=False)
class Row:
    """One sequence of an accepted request, which has `n` of them.

    Attributes:
        params: the request's, with arguments for processors in `extra_args`.
        prompt_ids, output_ids: token ids. The lists stay the same objects; only `output_ids` grows.
        state: free for the processor, initially None. A preemption resets it while `output_ids` keeps its tokens, so
            it must be derivable from the tokens.
    """

    params: SamplingParams
    prompt_ids: list[int]
    output_ids: list[int]
    state: Any = None


class LogitsProcessor(ABC):
    """Constructed once, at engine start, without arguments or with a `ProcessorContext`."""

    alone: ClassVar[bool] = False
    """Whether `apply` is always called with a single row."""

    def accepts(self, params: SamplingParams) -> bool:
        """Return whether to process a request; refused ones cost nothing.

        Raises:
            ValueError: the request is invalid; it is refused with this text.
        """
        return True

    @abstractmethod
    def apply(self, logits: Tensor, rows: Sequence[Row]) -> Tensor | None:
        """Return the changed logits, or None if they were changed in place. Called once a step.

        Args:
            logits: [R, vocab] float32, a copy of the rows of accepted requests that get a token in this step.
            rows: R of them. If the call raises, it is repeated for each row alone, and only the requests that raise
                again end with the error.
        """


class AdapterLogitsProcessor(LogitsProcessor):
    """One function for each request; vLLM's interface."""

    alone = True

    def __init__(self, *context: Any) -> None:
        """Accept and ignore the arguments of a subclass."""

    @abstractmethod
    def new_req_logits_processor(self, params: SamplingParams) -> RequestProcessor | None:
        """Return the function for each sequence of the request; None to skip the request.

        Also called when the request arrives, where ValueError refuses it.
        """

    def accepts(self, params: SamplingParams) -> bool:
        return self.new_req_logits_processor(params) is not None

    def apply(self, logits: Tensor, rows: Sequence[Row]) -> Tensor | None:
        (row,) = rows
        if row.state is None:
            row.state = _ProcessorCall.of(self.new_req_logits_processor(row.params))
        changed = row.state(row, logits[0])
        return None if changed is None else changed.unsqueeze(0)


class PerRequest(AdapterLogitsProcessor):
    """Adapts a factory of functions that is not an `AdapterLogitsProcessor`."""

    def __init__(self, factory: Callable[[SamplingParams], RequestProcessor | None]) -> None:
        self._factory = factory

    def new_req_logits_processor(self, params: SamplingParams) -> RequestProcessor | None:
        return self._factory(params)


@dataclass(frozen=True, slots=True)
class _ProcessorCall:
    """A request's function, and whether it takes the prompt."""

    function: RequestProcessor | None
    with_prompt: bool

    @classmethod
    def of(cls, function: RequestProcessor | None) -> _ProcessorCall:
        return cls(function, function is not None and arity(function) == 3)

    def __call__(self, row: Row, logits: Tensor) -> Tensor | None:
        if self.function is None:
            return None
        return self.function(*([row.prompt_ids] if self.with_prompt else []), row.output_ids, logits)


def arity(function: Callable[..., Any]) -> int | None:
    """Return 3 or 2, the number of arguments that the function accepts, 3 preferred; None if neither."""
    signature = inspect.signature(function)
    for count in (3, 2):
        try:
            signature.bind(*range(count))
        except TypeError:
            continue
        return count
    return None
