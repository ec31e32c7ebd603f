"""`Delta`: an addition to the product of a linear layer, such as a low-rank adapter's; set as `Projection.delta`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.native.bindings import Dtype, LowRank
from octavo.native.builder import ProgramBuilder
from octavo.native.experts import ExpertAdditions
from octavo.nn.norm import Norm
from octavo.nn.ops.activation import silu_mul


class Addition(ABC):
    """What a delta adds for one input. It may be computed beside the product."""

    @abstractmethod
    def add_to(self, y: Tensor) -> None:
        """Add it to y [T, out] in place: the layer's product, or what that is added to."""

    def gated(self, y: Tensor) -> Tensor:
        """Return silu(first half) * second half of y plus the addition: [T, out] to [T, out / 2]. y may be
        overwritten."""
        self.add_to(y)
        return silu_mul(y)

    def alone(self) -> tuple[Tensor, Tensor] | None:
        """Return it as a new tensor [T, out], and [at least T] int32, negative for rows that it does not change, whose
        values are undefined. None if it can only be computed by `add_to`."""
        return None


@dataclass(frozen=True, slots=True)
class SortedChoices:
    """The choices of a step's tokens, by expert and token; see `sort` in `nn/ops/expert_products.py`.

    Attributes:
        order: [choices] int32: place -> choice, token * top_k + its number; unwritten past those of this rank's
            experts.
        tiles: [most tiles, 3] int32: an expert, counted from `begin`, its first place, and the number of places; 0
            places after the last tile.
        height: most places of a tile.
        begin: the rank's first expert.
    """

    order: Tensor
    tiles: Tensor
    height: int
    top_k: int
    begin: int


class ExpertsDelta(ABC):
    """Additions to the products of a mixture's experts, that depend on their inputs and on the rows' requests.

    Attributes:
        sorts: it adds to choices that the device sorted (`add_sorted`), so that steps can be recorded; otherwise to one
            expert after another (`add_to`).
    """

    sorts = False

    @abstractmethod
    def add_to(self, y: Tensor, x: Tensor, expert: int, rows: Tensor, *, down: bool) -> None:
        """Add to an expert's product y [N, out], in place.

        Args:
            x: [N, in], what was multiplied.
            expert: its index among all experts of the layer.
            rows: [N], the step's rows that these are.
            down: y is the product after the gate, not the one before it.
        """

    def add_sorted(self, y: Tensor, x: Tensor, chosen: SortedChoices, *, down: bool) -> None:
        """Add to the products of all choices, in place.

        Args:
            y: [choices, out]: the product after the gate has a row for each choice, in their own order; the one before
                it for each place.
            x: [choices, in], what was multiplied, a row for each place.
            down: as for `add_to`.
        """
        raise NotImplementedError

    def in_program(self, owned: range) -> ExpertAdditions:
        """Return the additions to the experts of this rank for a native program, which computes them."""
        raise NotImplementedError


class Delta(ABC):
    """An addition to y = x @ W^T + b that depends on x and on the rows' requests.

    Attributes:
        fused_rows: most rows supported by `fused`; 0 if it can't be fused with the product.
    """

    fused_rows = 0

    @abstractmethod
    def begin(self, x: Tensor) -> Addition:
        """Begin to compute the addition for x [T, in], which must not change until it is added.

        Called before the product's own launch, so that both can run side by side.
        """

    def fused(
        self,
        x: Tensor,
        weight: Tensor,
        *,
        bias: Tensor | None = None,
        norm: tuple[Tensor, float] | None = None,
        gated: bool = False,
        add_to: Tensor | None = None,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """Return the product and the addition, as `fused_product` in `nn/ops/few_rows.py`."""
        raise NotImplementedError

    def emit(self, b: ProgramBuilder, source: int, given: Dtype, columns: int, norm: Norm | None = None) -> LowRank:
        """Add the first half of the addition to a native program; the product adds the second half.

        Args:
            source: the buffer of x [T, columns], whose rows have dtype `given`, not quantized.
            norm: the norm that makes x of the rows, which are float32; None if they are x.

        Returns:
            The argument of `ProgramBuilder.linear`.
        """
        raise NotImplementedError
