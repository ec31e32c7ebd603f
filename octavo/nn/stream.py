"""`Stream`: the residual stream of a decoder."""

from __future__ import annotations

from typing import Protocol, TypeVar

import torch
from torch import Tensor

from octavo.nn.ops.norm import rms_norm, sum_rms_norm

T = TypeVar("T", covariant=True)
X = TypeVar("X", contravariant=True)


class Pending(Protocol):
    """An addition that is being computed."""

    def total(self) -> Tensor:
        """Return it, [T, hidden_size]; what is launched later finds it there."""
        ...


class Summands(Protocol):
    """An addition to a stream that consists of several, which the launch of an RMS norm can add up."""

    def total(self) -> Tensor:
        """Return their sum, [T, hidden_size], as a new tensor."""
        ...

    def normed_with(self, stream: Tensor, norm: tuple[Tensor, float], dtype: torch.dtype) -> Tensor:
        """Add the sum to stream [T, hidden_size] in place, and return its RMS norm in a dtype.

        Args:
            norm: its weight and epsilon.
        """
        ...


class Begun:
    """`Summands` that are being added up, such as a sum over ranks."""

    def __init__(self, pending: Pending) -> None:
        self._pending = pending

    def total(self) -> Tensor:
        return self._pending.total()

    def normed_with(self, stream: Tensor, norm: tuple[Tensor, float], dtype: torch.dtype) -> Tensor:
        found = self._pending.total()
        if stream.is_cuda:
            return sum_rms_norm(found[None], stream, *norm, dtype)
        return rms_norm(stream.add_(found), *norm, dtype)


class StreamNorm(Protocol[T]):
    """The forms of a norm that a stream needs; see `Norm`."""

    def __call__(self, x: Tensor, /) -> T: ...

    def add(self, x: Tensor, residual: Tensor) -> tuple[T, Tensor]: ...

    def after(self, parts: Tensor | None, stream: Tensor) -> T: ...

    def summed(self, summands: Summands, stream: Tensor) -> T: ...


class Stream:
    """The residual stream [T, hidden_size], with pending additions.

    Additions are deferred to the next norm, which fuses them into its launch.

    Attributes:
        value: the sum so far, in the residual dtype.
        waits: other tokens are computed between an addition and the next norm, so that a sum over ranks can run beside.
    """

    __slots__ = ("_output", "_own", "_parts", "_summands", "value", "waits")

    def __init__(self, value: Tensor, *, waits: bool = False) -> None:
        """`value` is never modified."""
        self.value, self.waits = value, waits
        self._own = False
        self._output: Tensor | None = None
        self._parts: Tensor | None = None
        self._summands: Summands | None = None

    @property
    def rows(self) -> int:
        return self.value.shape[0]

    @property
    def dtype(self) -> torch.dtype:
        return self.value.dtype

    @property
    def settled(self) -> bool:
        """Whether no addition is pending."""
        return self._output is None and self._parts is None and self._summands is None

    def writable(self) -> Tensor:
        """Return `value` in memory that may be modified in place."""
        if not self._own:
            self.value = self.value.clone(memory_format=torch.contiguous_format)
            self._own = True
        return self.value

    def add_later(self, output: Tensor) -> None:
        """Add a block's output [T, hidden_size] with the next norm, which may overwrite it with the sum."""
        self.settle()
        self._output = output

    def add_parts_later(self, parts: Tensor | None) -> None:
        """Add the parts of a product [P, T, hidden_size] with the next norm. None adds nothing."""
        self.settle()
        self._parts = parts

    def add_summands_later(self, summands: Summands) -> None:
        """Add these with the next norm."""
        self.settle()
        self._summands = summands

    def normed(self, norm: StreamNorm[T]) -> T:
        """Apply pending additions and return norm(stream): [T, hidden_size] in the norm's form."""
        if self._summands is not None:
            summands, self._summands = self._summands, None
            return norm.summed(summands, self.writable())
        if self._output is not None:
            normed, self.value = norm.add(self._output, self.value)
            self._output, self._own = None, True
            return normed
        if self._parts is not None:
            parts, self._parts = self._parts, None
            return norm.after(parts, self.writable())
        return norm(self.value)

    def multiply(self, factor: Tensor) -> None:
        """Multiply the stream, with all additions, by a tensor of one number without dimensions."""
        self.settle()
        self.value, self._own = self.value.mul_(factor) if self._own else self.value * factor, True

    def choose(self, rows: Tensor | None) -> None:
        """Keep only these rows [S]; None keeps all."""
        if rows is None:
            return
        self._sum_up()
        self.value, self._own = self.value.index_select(0, rows), True
        if self._output is not None:
            self._output = self._output.index_select(0, rows)
        if self._parts is not None:
            self._parts = self._parts.index_select(1, rows)

    def total(self) -> Tensor:
        """Return the stream with all additions."""
        self.settle()
        return self.value

    def settle(self) -> None:
        """Apply pending additions without a norm."""
        self._sum_up()
        if self._output is not None:
            self.value, self._output, self._own = self.value + self._output, None, True
        if self._parts is not None:
            self.writable().add_(self._parts.sum(0, dtype=torch.float32))
            self._parts = None

    def _sum_up(self) -> None:
        if self._summands is not None:
            self._output, self._summands = self._summands.total(), None


class StreamOutput(Protocol[X]):
    """The last operation of a layer's part: a projection, or what else makes [T, hidden_size] of the part's values."""

    def __call__(self, x: X, /) -> Tensor:
        """Return the part's output, [T, hidden_size], as a new tensor."""
        ...

    def into(self, stream: Stream, x: X) -> None:
        """Add the part's output to the stream."""
        ...
