"""A mixture of experts beside a dense feed-forward."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from octavo.core.errors import ConfigError
from octavo.models.feed_forwards.base import FeedForward
from octavo.models.feed_forwards.mlp import Mlp
from octavo.models.feed_forwards.spec import BesideSpec
from octavo.native.bindings import Dtype
from octavo.native.builder import RESIDUAL, ProgramBuilder
from octavo.nn.build import Build
from octavo.nn.norm import Norm, RMSNorm
from octavo.nn.ops.routing import Routing
from octavo.nn.quant.packed_experts import Beside, routing_args
from octavo.nn.shard import NONE
from octavo.nn.stream import Stream
from octavo.nn.weights import Stored, TensorSpec, Wanted, WeightLayer, owned, plain, tensor_bytes


class ExpertsBeside(FeedForward):
    """mlp_norm(mlp(norm(x))) + mixed_norm(experts(experts_norm(x))).

    Attributes:
        out: adds the sum, which is computed already.
    """

    def __init__(self, b: Build, spec: BesideSpec, hidden_size: int, *, bias: bool) -> None:
        super().__init__()
        self.hidden_size, self.routing = hidden_size, spec.experts.routing
        self.mlp = Mlp(b, spec.mlp, hidden_size, bias=bias)
        self.mlp_norm, self.experts_norm, self.mixed_norm = (
            b.norm(name, hidden_size, spec.eps) for name in ("mlp_norm", "experts_norm", "mixed_norm")
        )
        router = b.at("gate")
        self.router_norm = RouterNorm(router.at("norm").path, b.device, b.dtype, hidden_size, spec.eps)
        self.router = b.linear("gate", inputs=hidden_size, outputs=spec.experts.num_experts, shard=NONE)
        self.scales = ExpertScales(router, spec.experts.num_experts) if self.routing.scaled else None
        self.experts = b.at("experts").experts(spec.experts.form(hidden_size))
        if self.experts.exchange is not None:
            raise ConfigError(
                "This model's router reads other states than its experts, which ranks with requests of their own do "
                "not exchange. Leave --data-parallel-size out."
            )
        self.out = _Done()

    def forward(self, stream: Stream, norm: Norm) -> Tensor:
        """Return the sum, [T, hidden_size]."""
        dense = self.mlp_norm(self.mlp.of(stream.normed(norm)))
        x = stream.total()
        mixed = self.experts(self.experts_norm(x), self._route(x))
        return dense.add_(self.mixed_norm(mixed))

    def _route(self, x: Tensor) -> Routing:
        """Choose the experts of tokens x [T, hidden_size], which are not normalized."""
        found = self.experts.route(self.router.wide(self.router_norm(x)), self.routing)
        if self.scales is None:
            return found
        return found._replace(weights=found.weights * self.scales.value[found.experts.long()])

    def emit(self, b: ProgramBuilder, norm: Norm, after: Norm | None = None, scale: float = 1.0) -> None:
        size, mesh = self.hidden_size * 4, self.experts.mesh
        total, mixed = b.scratch("beside: dense", size), b.scratch("beside: mixed", size)
        self.mlp.emit_product(b, norm, mixed)
        if mesh.size > 1:
            b.all_reduce(mixed, mixed, self.hidden_size, mesh.exchange)
        self.mlp_norm.emit(b, mixed, total, Dtype.FLOAT)
        logits = b.scratch("experts: logits", self.router.matrix.rows * 4)
        self.router.emit_after_norm(b, self.router_norm, logits)
        x = self.experts_norm.emit(b, RESIDUAL, b.scratch("experts: input", size), Dtype.FLOAT)
        scales = None if self.scales is None else self.scales.value
        args = routing_args(self.routing, self.experts.form.num_experts, None, Beside(), scales)
        delta = self.experts.delta
        additions = None if delta is None else delta.in_program(self.experts.form.owned)
        self.experts.packed.emit(b, args, logits, x, mixed, additions=additions)
        if mesh.size > 1:
            b.all_reduce(mixed, mixed, self.hidden_size, mesh.exchange)
        b.norm(mixed, total, Dtype.FLOAT, self.mixed_norm.kernel_args(), add=1.0)
        last = None if after is None else after.kernel_args()
        assert last is not None, "the sum has a norm"
        b.norm(total, RESIDUAL, Dtype.FLOAT, last, add=scale)


class RouterNorm(RMSNorm):
    """An RMSNorm whose stored weights are divided by the square root of their number; they are named `scale`."""

    def wanted(self) -> list[Wanted]:
        return [Wanted(f"{self.path}.scale", TensorSpec((self.size,), torch.float32))]

    def place(self, tensors: Sequence[Stored | None]) -> None:
        super().place(tensors)
        self.weight = (self.weight * self.size**-0.5).to(self.dtype)


class ExpertScales(WeightLayer):
    """Factors of the experts' weights in the sum.

    Attributes:
        value: [num_experts] float32.
    """

    def __init__(self, b: Build, num_experts: int) -> None:
        super().__init__(b.path, b.device)
        self._spec = TensorSpec((num_experts,), torch.float32)
        self.value = torch.empty(0)

    def wanted(self) -> list[Wanted]:
        return [Wanted(f"{self.path}.expert_scale", self._spec)]

    def place(self, tensors: Sequence[Stored | None]) -> None:
        (value,) = tensors
        self.value = owned(plain(value))

    @property
    def nbytes(self) -> int:
        return tensor_bytes(self.value)


class _Done:
    """Adds a finished sum to the stream."""

    def __call__(self, x: Tensor, /) -> Tensor:
        return x

    def into(self, stream: Stream, x: Tensor) -> None:
        stream.add_later(x)
