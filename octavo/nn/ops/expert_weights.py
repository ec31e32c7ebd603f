"""Weights of experts on a GPU, as kernels read them."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from octavo.nn.experts_spec import ExpertsForm


@dataclass(frozen=True, slots=True)
class StackedWeights:
    """The weights of a layer's experts, or of some of them.

    Attributes:
        gate_up: [E, 2 * size, hidden_size] contiguous: each expert's gate, then its operand; [E, size, hidden_size]
            without gates.
        down: [E, hidden_size, size] contiguous, of the same dtype.
        gate_up_bias, down_bias: [E, outputs of gate_up] and [E, hidden_size]; None for none.
        begin: the first of these experts; choices of others count as 0.
    """

    gate_up: Tensor
    down: Tensor
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    begin: int = 0


def gate_arguments(form: ExpertsForm) -> tuple[float, float, str]:
    """Return the kernels' alpha, limit and activation."""
    if form.clamped is None:
        return 1.0, 0.0, form.activation
    return float(form.clamped.alpha), float(form.clamped.limit), "clamped"
