"""A dense feed-forward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torch import Tensor

from octavo.models.feed_forwards.base import FeedForward
from octavo.models.feed_forwards.spec import MlpSpec
from octavo.native.bindings import Dtype
from octavo.native.builder import ProgramBuilder, Results, activated
from octavo.nn.build import Build
from octavo.nn.linear import Linear
from octavo.nn.norm import Norm
from octavo.nn.ops.activation import ACTIVATIONS
from octavo.nn.rounded import Activations
from octavo.nn.shard import COL, ROW
from octavo.nn.stream import Stream
from octavo.nn.xielu import Xielu


class Mlp(FeedForward):
    """down(act(gate(x)) * up(x)), or down(act(up(x))).

    Attributes:
        curve: the activation, if it has parameters.
        out: the projection `down`.
    """

    activation: Callable[[Tensor], Tensor]
    out: Linear

    def __init__(self, b: Build, spec: MlpSpec, hidden_size: int, *, bias: bool) -> None:
        super().__init__()
        self.curve = Xielu(b.at("act_fn").path, b.device, spec.curve) if spec.activation == "xielu" else None
        self.activation = ACTIVATIONS[spec.activation] if self.curve is None else self.curve
        self.gated = spec.gated
        names = ("gate_proj", "up_proj") if spec.gated else ("up_proj",)
        self.gate_up = b.linear(
            *names,
            inputs=hidden_size,
            outputs=spec.size,
            shard=COL,
            bias=bias,
            gates=spec.gated,
            activation=spec.activation,
        )
        self.out = b.linear("down_proj", inputs=spec.size, outputs=hidden_size, shard=ROW, bias=bias)

    def forward(self, stream: Stream, norm: Norm) -> Activations:
        """Return what `down` multiplies: [T, size] for norm(stream)."""
        if self.gated:
            return self.gate_up.gated_after_norm(stream, norm, self.out)
        return self.activation(self.gate_up.after_norm(stream, norm))

    def of(self, x: Tensor) -> Tensor:
        """Return the feed-forward of a normalized x: [T, hidden_size] for [T, hidden_size]."""
        return self.out(self.gate_up.gated(x) if self.gated else self.activation(self.gate_up(x)))

    def emit(self, b: ProgramBuilder, norm: Norm, after: Norm | None = None, scale: float = 1.0) -> None:
        inner, dtype = self._emit_inner(b, norm)
        self.out.emit_into(b, inner, dtype, after, scale)

    def emit_product(self, b: ProgramBuilder, norm: Norm, output: int, scale: float = 1.0) -> None:
        """Write `of` the normalized stream, times `scale`, to a buffer of float32 [T, hidden_size], in a native
        program."""
        inner, dtype = self._emit_inner(b, norm)
        self.out.emit(b, inner, dtype, output, Results(scale=scale))

    def _emit_inner(self, b: ProgramBuilder, norm: Norm) -> tuple[int, Dtype]:
        """Compute what `down` multiplies; return its buffer, and the dtype of its rows."""
        down = self.out.matrix
        dtype = Dtype.BFLOAT if b.meets(down.dtype) is Dtype.BFLOAT else Dtype.FLOAT
        inner = b.scratch("inner", down.columns * 4)
        results = activated(self.gate_up.activation, dtype, gated=self.gated)
        if self.curve is not None:
            results = replace(results, curve=self.curve.curve.data_ptr())
        self.gate_up.emit_after_norm(b, norm, inner, results)
        return inner, dtype
