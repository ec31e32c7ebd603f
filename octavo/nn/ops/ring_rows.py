"""For which plain matrices the kernel of few rows (`row16.py`) is faster than other products of 2 to 8 rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from octavo.nn.ops import row16
from octavo.nn.ops.race import Pays
from octavo.nn.ops.ring import COLUMNS, MOST_ROWS, columns_for
from octavo.nn.ops.triton_norm import rms_norm, sum_rms_norm


class Use(NamedTuple):
    """A product of up to `rows` rows, and what it is for.

    Attributes:
        rows: one of `COLUMNS`.
        dtype: of the factors.
        result: dtype of the product.
        gated: its halves are a gate and its operand.
        added: it is added to a residual stream.
    """

    rows: int
    outputs: int
    inputs: int
    dtype: torch.dtype
    result: torch.dtype
    gated: bool
    added: bool

    @property
    def name(self) -> str:
        kind = "gated" if self.gated else "added" if self.added else "product"
        shape = (self.rows, self.outputs, self.inputs, self.dtype, self.result)
        return "-".join([*(str(one).removeprefix("torch.") for one in shape), kind, "ring"])


class Usual(Protocol):
    """The products that are used otherwise: those of `products.py`."""

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype | None = None) -> Tensor: ...

    def gated(self, x: Tensor, weight: Tensor) -> Tensor: ...

    def halves(self, x: Tensor, weight: Tensor) -> Tensor | None: ...

    def add_linear(self, stream: Tensor, x: Tensor, weight: Tensor) -> None: ...


class RingRows:
    """The uses for which the kernel was chosen.

    Args:
        known: earlier choices, by name; gets new ones.
        pays: whether the kernel is to be used in place of another product.
    """

    def __init__(self, known: MutableMapping[str, str], pays: Pays) -> None:
        self._known = known
        self._pays = pays
        self._chosen: set[Use] = set()

    def takes(self, x: Tensor, weight: Tensor, result: torch.dtype, *, gated: bool, added: bool) -> bool:
        """Return whether the kernel multiplies x [M, K] by a matrix, both contiguous."""
        if not 1 < x.shape[0] <= MOST_ROWS or not self._chosen:
            return False
        outputs, inputs = weight.shape
        use = Use(columns_for(x.shape[0]), outputs, inputs, weight.dtype, result, gated, added)
        return use in self._chosen and x.dtype == weight.dtype

    def begin(self, weight: Tensor, result: torch.dtype, *, gated: bool, added: bool) -> None:
        """Compile the kernels for a matrix in the background."""
        for use in _uses(weight, result, gated=gated, added=added):
            if self._known.get(use.name, "ring"):
                row16.compile_rows_ahead(use.outputs, use.inputs, use.dtype, use.rows, result, gated=gated, added=added)

    def choose(self, weights: Sequence[Tensor], result: torch.dtype, usual: Usual, *, gated: bool, added: bool) -> int:
        """Choose for like matrices; return how many uses were measured."""
        tried = 0
        for use in _uses(weights[0], result, gated=gated, added=added):
            x = torch.randn(use.rows, use.inputs, dtype=use.dtype, device=weights[0].device)
            ours, theirs = _candidates(use, x, usual)
            if use.name not in self._known:
                self._known[use.name] = "ring" if self._pays(ours, theirs, weights, use.rows) else ""
                tried += 1
            if self._known[use.name]:
                ours(weights[0])  # loads it
                self._chosen.add(use)
        return tried


def _uses(weight: Tensor, result: torch.dtype, *, gated: bool, added: bool) -> Iterator[Use]:
    outputs, inputs = weight.shape
    if added and result != weight.dtype:
        return
    for rows in COLUMNS:
        if row16.serves_rows(rows, outputs, inputs, weight.dtype, weight.device, gated=gated):
            yield Use(rows, outputs, inputs, weight.dtype, result, gated, added)


def _candidates(use: Use, x: Tensor, usual: Usual) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]:
    """Return the kernel and the usual product; if it is added to a stream, each with the norm that follows, which makes
    results equal however often it was added."""
    if use.gated:
        return lambda weight: row16.rows_product(x, weight, gated=True), lambda weight: usual.gated(x, weight)
    if not use.added:
        return (
            lambda weight: row16.rows_product(x, weight, dtype=use.result),
            lambda weight: usual.linear(x, weight, None, use.result),
        )
    stream = torch.zeros(use.rows, use.outputs, dtype=use.result, device=x.device)
    norm = torch.ones(use.outputs, dtype=use.result, device=x.device)

    def ours(weight: Tensor) -> Tensor:
        row16.rows_product(x, weight, add_to=stream)
        return rms_norm(stream, norm, 1e-5)

    def theirs(weight: Tensor) -> Tensor:
        parts = usual.halves(x, weight)
        if parts is not None:
            return sum_rms_norm(parts, stream, norm, 1e-5)
        usual.add_linear(stream, x, weight)
        return rms_norm(stream, norm, 1e-5)

    return ours, theirs
