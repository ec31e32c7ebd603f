"""Causal depthwise convolutions over the tokens of a sequence."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from octavo.native import recurrent
from octavo.native.bindings import Dtype
from octavo.native.builder import ProgramBuilder
from octavo.native.recurrent import Conv, States
from octavo.nn.quant.panels import PANEL
from octavo.nn.recurrent.rows import HostRows, before
from octavo.nn.shard import Run, own_of_runs
from octavo.nn.step import StepInput
from octavo.nn.weights import Index, Stored, TensorSpec, Wanted, WeightLayer, fused, plain, tensor_bytes
from octavo.parallel.mesh import ALONE, Mesh


class CausalConv(WeightLayer):
    """Each channel's output is a weighted sum of its last inputs, the token's own included.

    The inputs before the step are the layer's state, [channels, taps - 1]; zeros before a sequence begins.

    Attributes:
        channels: on this rank.
    """

    def __init__(
        self,
        path: str,
        device: torch.device,
        runs: Sequence[Run],
        taps: int,
        *,
        bias: bool,
        activates: bool = True,
        mesh: Mesh = ALONE,
    ) -> None:
        """
        Args:
            runs: the channels of all ranks, by their kinds.
            activates: apply SiLU to the sums.
        """
        super().__init__(path, device)
        self._stored = sum(run.size for run in runs)
        self._own = own_of_runs(runs, mesh) if mesh.size > 1 else (range(self._stored),)
        self.channels, self.taps = sum(map(len, self._own)), taps
        self.has_bias, self.activates = bias, activates
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

    def emit(
        self,
        b: ProgramBuilder,
        source: int,
        output: int,
        states: States,
        group: int,
        *,
        begin: int = 0,
        gates: tuple[int, int] = (-1, -1),
        dtype: Dtype = Dtype.FLOAT,
    ) -> None:
        """Add `forward` to a native program.

        Args:
            source: buffer of float32 rows with the inputs from value `begin` on.
            output: buffer for [T, channels] in `dtype`.
            group: the layer's cache group.
            gates: where in the rows begins what multiplies the inputs, and the outputs; -1 for nothing.
        """
        weight = F.pad(self.weight.T, (0, -self.channels % PANEL)).contiguous()
        bias = None if self.bias is None else F.pad(self.bias, (0, -self.channels % PANEL))
        b.kept.extend((weight, bias))
        conv = Conv(
            weight=weight.data_ptr(),
            bias=0 if bias is None else bias.data_ptr(),
            states=states,
            channels=self.channels,
            stride=weight.shape[1],
            taps=self.taps,
            begin=begin,
            before=gates[0],
            after=gates[1],
            activates=int(self.activates),
        )
        recurrent.convolve(b, conv, source, output, dtype, group)

    def wanted(self) -> list[Wanted]:
        shapes = {"weight": (self._stored, 1, self.taps), "bias": (self._stored,)}
        return [
            Wanted(f"{self.path}.{name}", TensorSpec(shape, torch.float32), index=self._index(own, shape))
            for name, shape in shapes.items()
            if name == "weight" or self.has_bias
            for own in self._own
        ]

    def place(self, tensors: Sequence[Stored | None]) -> None:
        count = len(self._own)
        given = [plain(tensor) for tensor in tensors]
        self.weight = fused(given[:count]).squeeze(1)
        self.bias = fused(given[count:]) if self.has_bias else None

    def _index(self, own: range, shape: Sequence[int]) -> Index | None:
        """Return the part of a stored tensor with these channels; None for all."""
        return None if len(own) == self._stored else (slice(own.start, own.stop), *map(slice, shape[1:]))

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
