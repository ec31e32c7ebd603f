"""A mixture of experts."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from octavo.models.feed_forwards.base import FeedForward
from octavo.models.feed_forwards.mlp import Mlp
from octavo.models.feed_forwards.spec import ExpertsSpec, MlpSpec
from octavo.nn.build import Build
from octavo.nn.experts_spec import ExpertsForm
from octavo.nn.norm import Norm
from octavo.nn.rounded import Activations
from octavo.nn.shard import NONE
from octavo.nn.stream import Stream
from octavo.nn.weights import Stored, TensorSpec, Wanted, WeightLayer, owned, plain, tensor_bytes


class Experts(FeedForward):
    """The weighted sum of each token's experts, plus the shared expert if there is one.

    Attributes:
        out: adds the sum, which is computed already.
    """

    def __init__(self, b: Build, spec: ExpertsSpec, hidden_size: int, *, bias: bool) -> None:
        super().__init__()
        self.routing, self.shared_spec = spec.routing, spec.shared
        self.router = b.linear("gate", inputs=hidden_size, outputs=spec.num_experts, shard=NONE, bias=spec.routing.bias)
        self.correction = Correction(b.at("gate"), spec.num_experts) if spec.routing.corrected else None
        form = ExpertsForm(
            num_experts=spec.num_experts,
            hidden_size=hidden_size,
            size=spec.size,
            activation=spec.activation,
            gated=spec.gated,
            clamped=spec.clamped,
            bias=spec.bias,
            on_inputs=spec.routing.on_inputs,
        )
        self.experts = b.at("experts").experts(form)
        shared = spec.shared
        self.shared = (
            Mlp(b.at(shared.name), MlpSpec(shared.size, spec.activation, spec.gated), hidden_size, bias=bias)
            if shared
            else None
        )
        self.shared_gate = (
            b.linear(shared.gate, inputs=hidden_size, outputs=1, shard=NONE) if shared and shared.gate else None
        )
        self.out = _Added()

    def forward(self, stream: Stream, norm: Norm) -> Tensor:
        """Return the sum for norm(stream), [T, hidden_size]."""
        x = stream.normed(norm)
        correction = self.correction.bias if self.correction else None
        routing = self.experts.route(self.router.wide(x), self.routing, correction)
        if self.shared is None:
            return self.experts(x, routing)
        shared = self.shared.of(x)
        if self.shared_gate is not None:
            shared = torch.sigmoid(self.shared_gate(x)) * shared
        return self.experts(x, routing, shared)


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


class _Added:
    """Adds a finished output to the stream."""

    def __call__(self, x: Activations, /) -> Tensor:
        assert isinstance(x, Tensor), "finished outputs are not rounded"
        return x

    def into(self, stream: Stream, x: Activations) -> None:
        stream.add_later(self(x))
