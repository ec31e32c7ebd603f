"""Causal depthwise convolutions over the tokens of a sequence."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from octavo.nn.recurrent.rows import HostRows, before
from octavo.nn.step import StepInput
from octavo.nn.weights import Stored, TensorSpec, Wanted, WeightLayer, owned, plain, tensor_bytes


class CausalConv(WeightLayer):
    """Each channel's output is a weighted sum of its last inputs, the token's own included.

    The inputs before the step are the layer's state, [channels, taps - 1]; zeros before a sequence begins.
    """

    def __init__(
        self, path: str, device: torch.device, channels: int, taps: int, *, bias: bool, activates: bool = True
    ) -> None:
        """
        Args:
            activates: apply SiLU to the sums.
        """
        super().__init__(path, device)
        self.channels, self.taps, self.has_bias, self.activates = channels, taps, bias, activates
        self.weight = torch.empty(0)
        self.bias: Tensor | None = None

    @property
    def state_shape(self) -> tuple[int, int]:
        return self.channels, self.taps - 1

    def forward(self, x: Tensor, states: Tensor, step: StepInput) -> Tensor:
        """Return [T, channels] float32.

        Args:
            x: [T, channels].
            states: [blocks, channels, taps - 1] float32, overwritten.
            step: that of the layer's cache group.
        """
        return causal_conv(x, self.weight, self.bias, states, step, activates=self.activates)

    def wanted(self) -> list[Wanted]:
        weight = Wanted(f"{self.path}.weight", TensorSpec((self.channels, 1, self.taps), torch.float32))
        bias = Wanted(f"{self.path}.bias", TensorSpec((self.channels,), torch.float32))
        return [weight, bias] if self.has_bias else [weight]

    def place(self, tensors: Sequence[Stored | None]) -> None:
        placed = [owned(plain(tensor)) for tensor in tensors]
        self.weight = placed[0].squeeze(1)
        self.bias = placed[1] if self.has_bias else None

    @property
    def nbytes(self) -> int:
        return tensor_bytes(self.weight, self.bias)


def causal_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, states: Tensor, step: StepInput, *, activates: bool
) -> Tensor:
    """Return bias + the sum over taps i of weight[:, i] * input of the token taps - 1 - i places before; see
    `CausalConv.forward`.

    Args:
        weight: [channels, taps] float32.
        bias: [channels] float32.
    """
    if x.is_cuda or step.table_rows is not None:
        from octavo.nn.recurrent import triton_conv  # needs triton, which machines without a GPU may lack

        return triton_conv.causal_conv(x, weight, bias, states, step, activates=activates)
    rows, x = HostRows.of(step), x.float()
    out = torch.empty_like(x)
    if rows.single:
        kept, blocks = before(states, step, rows.single)
        window = torch.cat([kept, x[rows.tokens].unsqueeze(-1)], -1)
        states[blocks] = window[..., 1:]
        out[rows.tokens] = _sums(window, weight, 1).squeeze(-1)
    for row, first, end in rows.several:
        kept, blocks = before(states, step, [row])
        window = torch.cat([kept, x[first:end].T.unsqueeze(0)], -1)
        states[blocks] = window[..., end - first :]
        out[first:end] = _sums(window, weight, end - first)[0].T
    if bias is not None:
        out += bias
    return F.silu(out) if activates else out


def _sums(window: Tensor, weight: Tensor, length: int) -> Tensor:
    """Return [n, channels, length] for windows [n, channels, taps - 1 + length], summed tap by tap."""
    sums = window[..., :length] * weight[:, :1]
    for tap in range(1, weight.shape[1]):
        sums += window[..., tap : tap + length] * weight[:, tap : tap + 1]
    return sums
