"""`Rounded`: activations in 8 bits, between the operation that rounds them and the product that takes them."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Rounded:
    """Rows [T, size] of 8-bit numbers: value = code * scale.

    Attributes:
        codes: [T, size] E4M3.
        scales: [T, 1] float32; None: all rows were rounded with the static scale of the product that takes them.
    """

    codes: Tensor
    scales: Tensor | None = None

    @property
    def own_scales(self) -> Tensor:
        """The scales of rows that were not rounded with a static one."""
        assert self.scales is not None, "the rows were rounded with a static scale"
        return self.scales


Activations = Tensor | Rounded
"""What a layer's last projection takes."""
