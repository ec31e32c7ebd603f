"""Weights of experts on a GPU, as kernels read them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from octavo.nn.experts_spec import ExpertsForm
from octavo.nn.ops.tables import numbers_in
from octavo.nn.weights import E2M1

Kind = Literal["integers", "e2m1", "table"]
"""What numbers of 4 bits are."""


@dataclass(frozen=True, slots=True)
class PackedMatrices:
    """Matrices [E, N, K] of small numbers: value = scale * number + minimum; see `triton_packed_experts.py`.

    Attributes:
        codes: [E, N, C]: E4M3, E5M2 or int8 (C = K), or int16 words of 4 numbers of 4 bits, in blocks of `words`.
        scales: [E, groups, N], for each `group` inputs.
        minima: likewise, or None if all are 0.
        inputs: K.
        group: `words` divides it, unless it is K.
        kind: what numbers of 4 bits are; "integers" for those of 8 bits, whose dtype says it.
        rounds: many rows may be rounded to 8 bits, too.
        dtype: of activations.
        book: of a table, which all experts share, else None; see `tables.py`.
        tiled: each 128 outputs, from the first on, have the same scales.
    """

    codes: Tensor
    scales: Tensor
    minima: Tensor | None
    inputs: int
    group: int
    words: int
    kind: Kind
    rounds: bool
    dtype: torch.dtype
    book: Tensor | None = None
    tiled: bool = False

    def __len__(self) -> int:
        return len(self.codes)

    @property
    def fields(self) -> int:
        """Numbers of a code."""
        return 4 if self.codes.dtype == torch.int16 else 1

    @property
    def device(self) -> torch.device:
        return self.codes.device

    @property
    def whole(self) -> bool:
        """Whether outputs have one scale each, and no minima."""
        return self.scales.shape[1] == 1 and self.minima is None

    def values(self, expert: int) -> Tensor:
        """Return one expert's values [N, K] in float32."""
        codes = self.codes[expert]
        if self.fields == 1:
            numbers = codes.float()
        else:
            shifts = torch.arange(0, 16, 4, dtype=torch.int32, device=codes.device)
            fields = codes.view(len(codes), -1, 1, self.words).int() >> shifts[:, None] & 15
            numbers = self._numbers(fields).flatten(1)[:, : self.inputs]
        place = torch.arange(self.inputs, device=codes.device) // self.group
        values = numbers * self.scales[expert].float().T[:, place]
        return values if self.minima is None else values + self.minima[expert].float().T[:, place]

    def _numbers(self, fields: Tensor) -> Tensor:
        if self.kind == "integers":
            return (fields - 8).float()
        table = E2M1.numbers.to(fields.device) if self.book is None else numbers_in(self.book).float()
        return table[fields]


Matrices = Tensor | PackedMatrices


@dataclass(frozen=True, slots=True)
class StackedWeights:
    """The weights of a layer's experts, or of some of them.

    Attributes:
        gate_up: [E, 2 * size, hidden_size] contiguous: each expert's gate, then its operand; [E, size, hidden_size]
            without gates.
        down: [E, hidden_size, size] contiguous, of the same dtype. Either may be packed.
        gate_up_bias, down_bias: [E, outputs of gate_up] and [E, hidden_size]; None for none.
        begin: the first of these experts; choices of others count as 0.
    """

    gate_up: Matrices
    down: Matrices
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    begin: int = 0


def gate_arguments(form: ExpertsForm) -> tuple[float, float, str]:
    """Return the kernels' alpha, limit and activation."""
    if form.clamped is None:
        return 1.0, 0.0, form.activation
    return float(form.clamped.alpha), float(form.clamped.limit), "clamped"
