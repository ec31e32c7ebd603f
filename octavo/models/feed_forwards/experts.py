"""A mixture of experts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from octavo.models.feed_forwards.base import FeedForward
from octavo.models.feed_forwards.mlp import Mlp
from octavo.models.feed_forwards.spec import ExpertsSpec, MlpSpec
from octavo.native.bindings import Dtype
from octavo.native.builder import RESIDUAL, ProgramBuilder
from octavo.nn.build import Build
from octavo.nn.linear import emit_sum
from octavo.nn.norm import Norm
from octavo.nn.ops.routing import Routing
from octavo.nn.quant.packed_experts import Beside, routing_args
from octavo.nn.shard import NONE
from octavo.nn.stream import Stream, Summands
from octavo.nn.weights import Stored, TensorSpec, Wanted, WeightLayer, owned, plain, tensor_bytes


class Experts(FeedForward):
    """The weighted sum of each token's experts, plus the shared expert if there is one.

    Attributes:
        out: adds the sum, which is computed already.
    """

    def __init__(self, b: Build, spec: ExpertsSpec, hidden_size: int, *, bias: bool) -> None:
        super().__init__()
        self.hidden_size, self.routing = hidden_size, spec.routing
        self.router = b.linear("gate", inputs=hidden_size, outputs=spec.num_experts, shard=NONE, bias=spec.routing.bias)
        self.correction = Correction(b.at("gate"), spec.num_experts) if spec.routing.corrected else None
        self.experts = b.at("experts").experts(spec.form(hidden_size))
        shared = spec.shared
        self.shared = (
            Mlp(b.at(shared.name), MlpSpec(shared.size, spec.activation, spec.gated), hidden_size, bias=bias)
            if shared
            else None
        )
        self.shared_gate = (
            b.linear(shared.gate, inputs=hidden_size, outputs=1, shard=NONE) if shared and shared.gate else None
        )
        self.shared_scale = shared.scale if shared else 1.0
        self.out = _Sum(self)

    def forward(self, stream: Stream, norm: Norm) -> Tensor | Summands | OneToken:
        """Return the sum for norm(stream), [T, hidden_size], or what is left to add up."""
        scale = norm.scale
        fusing = None if self.shared_gate is not None or self.shared_scale != 1.0 else self.experts.fusing
        if fusing is not None and scale is not None and stream.rows == 1 and stream.settled:
            routing = self._chosen(self.router.after_norm(stream, norm, wide=True))
            inner = fusing.gate_rows(stream.value, scale, routing)
            return OneToken(inner, routing, None if self.shared is None else self.shared(stream, norm))
        x = stream.normed(norm)
        if self.experts.exchange is not None:
            return self.experts.exchanged(x, self._route, self._shared(x))
        routing = self._route(x)
        fusing = self.experts.fusing
        return (self.experts if fusing is None else fusing.summands)(x, routing, self._shared(x))

    def join(self, dtype: torch.dtype) -> None:
        if self.experts.exchange is not None:
            x = torch.empty(0, self.hidden_size, dtype=dtype, device=self.router.device)
            self.experts.exchanged(x, self._route)

    def _shared(self, x: Tensor) -> Tensor | None:
        shared = None if self.shared is None else self.shared.of(x)
        if shared is not None and self.shared_scale != 1.0:
            shared = shared * self.shared_scale
        if shared is None or self.shared_gate is None:
            return shared
        return torch.sigmoid(self.shared_gate(x)) * shared

    def _route(self, x: Tensor) -> Routing:
        """Choose the experts of tokens x [T, hidden_size]."""
        if len(x):
            return self._chosen(self.router.wide(x))
        experts = torch.empty(0, self.routing.top_k, dtype=torch.int32, device=x.device)
        return Routing(experts.float(), experts)

    def _chosen(self, logits: Tensor) -> Routing:
        return self.experts.route(logits, self.routing, self.correction.bias if self.correction else None)

    def add(self, stream: Stream, one: OneToken) -> None:
        """Add a token's second products to the stream."""
        fusing = self.experts.fusing
        assert fusing is not None
        if self.shared is not None and one.shared is not None:
            self.shared.out.into(stream, one.shared)
        fusing.add_rows(one.inner, one.routing, stream.writable())

    def emit(self, b: ProgramBuilder, norm: Norm, after: Norm | None = None, scale: float = 1.0) -> None:
        x = norm.emit(b, RESIDUAL, b.scratch("experts: input", self.hidden_size * 4), Dtype.FLOAT)
        if x != RESIDUAL:
            b.run_beside()
        logits = b.scratch("experts: logits", self.router.matrix.rows * 4)
        self.router.emit_after_norm(b, norm, logits)
        beside = Beside()
        if self.shared is not None:
            beside = Beside(b.scratch("experts: shared", self.hidden_size * 4))
            self.shared.emit_product(b, norm, beside.shared, self.shared_scale)
        if self.shared_gate is not None:
            beside = Beside(beside.shared, b.scratch("experts: shared gate", self.shared_gate.matrix.rows * 4))
            self.shared_gate.emit_after_norm(b, norm, beside.gate)
        correction = self.correction.bias if self.correction else None
        args = routing_args(self.routing, self.experts.form.num_experts, correction, beside)
        norm_args, mesh = None if after is None else after.kernel_args(), self.experts.mesh
        delta = self.experts.delta
        additions = None if delta is None else delta.in_program(self.experts.form.owned)
        if norm_args is None and mesh.size == 1:
            self.experts.packed.emit(b, args, logits, x, RESIDUAL, add=scale, additions=additions)
            return
        total = b.scratch("product", self.hidden_size * 4)
        self.experts.packed.emit(b, args, logits, x, total, additions=additions)
        emit_sum(b, total, self.hidden_size, mesh, norm_args, scale)


class OneToken(NamedTuple):
    """The gated products of one token.

    Attributes:
        inner: of its experts, [top_k, size].
        shared: of the shared expert, [1, size]; None without one.
    """

    inner: Tensor
    routing: Routing
    shared: Tensor | None


class Correction(WeightLayer):
    """A learned bias of the experts' scores.

    Attributes:
        bias: [num_experts] float32.
    """

    def __init__(self, b: Build, num_experts: int) -> None:
        super().__init__(b.path, b.device)
        self._spec = TensorSpec((num_experts,), torch.float32)
        self.bias: Tensor | None = None

    def wanted(self) -> list[Wanted]:
        return [Wanted(f"{self.path}.e_score_correction_bias", self._spec)]

    def place(self, tensors: Sequence[Stored | None]) -> None:
        (bias,) = tensors
        assert bias is not None
        self.bias = owned(plain(bias))

    @property
    def nbytes(self) -> int:
        return tensor_bytes(self.bias)


class _Sum:
    """Adds a finished sum to the stream, or what is left of one token."""

    def __init__(self, experts: Experts) -> None:
        self._experts = experts

    def __call__(self, x: Tensor | Summands | OneToken, /) -> Tensor:
        if isinstance(x, Tensor):
            return x
        if not isinstance(x, OneToken):
            return x.total()
        stream = Stream(torch.zeros(1, self._experts.hidden_size, dtype=x.inner.dtype, device=x.inner.device))
        self._experts.add(stream, x)
        return stream.total()

    def into(self, stream: Stream, x: Tensor | Summands | OneToken) -> None:
        if isinstance(x, Tensor):
            stream.add_later(x)
        elif isinstance(x, OneToken):
            self._experts.add(stream, x)
        else:
            stream.add_summands_later(x)
