"""What people write: `LogitsProcessor` for batches, `AdapterLogitsProcessor` for one request at a time."""

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

None in place of logits says that they were changed in place.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessorContext:
    """What a processor may know of its engine when it is made.

    Attributes:
        vocab_size: columns of the logits.
        device: where the logits are.
        model: the model's folder or file.
        max_num_seqs: the most rows there are at once.
        load_tokenizer: the model's tokenizer, loaded at the first call.
    """

    vocab_size: int
    device: torch.device
    model: str
    max_num_seqs: int
    load_tokenizer: Callable[[], Tokenizer]


@dataclass(slots=True, eq=False)
class Row:
    """One sequence that a processor takes part in: a request has `n` of them.

    Attributes:
        params: the request's, with what it brought for processors in `extra_args`.
        prompt_ids, output_ids: token ids. The lists stay the same objects; only `output_ids` grows.
        state: the processor's own, None at first. Made anew after a preemption, when `output_ids` is not empty: what it
            holds must follow from the tokens.
    """

    params: SamplingParams
    prompt_ids: list[int]
    output_ids: list[int]
    state: Any = None


class LogitsProcessor(ABC):
    """Made once, when the engine starts, without arguments or with a `ProcessorContext`."""

    alone: ClassVar[bool] = False
    """Whether `apply` is only ever called with one row."""

    def accepts(self, params: SamplingParams) -> bool:
        """Whether it has anything to do for a request; those of which it says no cost nothing.

        Raises:
            ValueError: the request can't be served; it is refused with this text.
        """
        return True

    @abstractmethod
    def apply(self, logits: Tensor, rows: Sequence[Row]) -> Tensor | None:
        """The changed logits; None if they were changed in place. Called once a step.

        Args:
            logits: [R, vocab] float32, a copy: of the rows of accepted requests that get a token in this step.
            rows: R of them. If it raises, it is called again for each row by itself, and only the requests of those
                that raise again end with the error.
        """


class AdapterLogitsProcessor(LogitsProcessor):
    """One function a request. The name and its method are vLLM's."""

    alone = True

    def __init__(self, *context: Any) -> None:
        """Takes whatever a subclass hands up."""

    @abstractmethod
    def new_req_logits_processor(self, params: SamplingParams) -> RequestProcessor | None:
        """The function for each sequence of the request; None if there is nothing to do for it.

        Also called when the request comes, to see whether there is; ValueError then refuses it.
        """

    def accepts(self, params: SamplingParams) -> bool:
        return self.new_req_logits_processor(params) is not None

    def apply(self, logits: Tensor, rows: Sequence[Row]) -> Tensor | None:
        (row,) = rows
        if row.state is None:
            row.state = _Call.of(self.new_req_logits_processor(row.params))
        changed = row.state(row, logits[0])
        return None if changed is None else changed.unsqueeze(0)


class PerRequest(AdapterLogitsProcessor):
    """Functions from a factory that is no `AdapterLogitsProcessor` itself."""

    def __init__(self, factory: Callable[[SamplingParams], RequestProcessor | None]) -> None:
        self._factory = factory

    def new_req_logits_processor(self, params: SamplingParams) -> RequestProcessor | None:
        return self._factory(params)


@dataclass(frozen=True, slots=True)
class _Call:
    """A request's function, and whether it wants the prompt."""

    function: RequestProcessor | None
    with_prompt: bool

    @classmethod
    def of(cls, function: RequestProcessor | None) -> _Call:
        return cls(function, function is not None and arity(function) == 3)

    def __call__(self, row: Row, logits: Tensor) -> Tensor | None:
        if self.function is None:
            return None
        return self.function(*([row.prompt_ids] if self.with_prompt else []), row.output_ids, logits)


def arity(function: Callable[..., Any]) -> int | None:
    """3 or 2 if the function can be called with so many arguments, in that order of preference; else None."""
    signature = inspect.signature(function)
    for count in (3, 2):
        try:
            signature.bind(*range(count))
        except TypeError:
            continue
        return count
    return None
