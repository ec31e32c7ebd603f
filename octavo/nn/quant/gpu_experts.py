"""Experts on a GPU, stacked for products that sort tokens on the device; unquantized ones."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from octavo.nn.delta import ExpertsDelta
from octavo.nn.experts_spec import ExpertsForm, RoutingSpec
from octavo.nn.ops import expert_rows, expert_tiles
from octavo.nn.ops.expert_products import mix_stacked, route_on_device, summands
from octavo.nn.ops.expert_weights import StackedWeights
from octavo.nn.ops.routing import Routing
from octavo.nn.ops.unfused_experts import mix_adding
from octavo.nn.weights import Stored, TensorSpec, plain, tensor_bytes

if TYPE_CHECKING:
    from octavo.nn.quant.base import Part
    from octavo.nn.stream import Summands


class DeviceExperts(ABC):
    """What both kinds of `ExpertsScheme` for a GPU share; also `FusingExperts`.

    Attributes:
        dtype: of activations.
    """

    recordable = True

    def __init__(self, form: ExpertsForm, dtype: torch.dtype, device: torch.device) -> None:
        self.form, self.dtype, self.device = form, dtype, device

    @property
    @abstractmethod
    def stacked(self) -> StackedWeights:
        """The weights, as kernels read them."""

    def stored(self, part: Part) -> dict[str, TensorSpec]:
        return part.plain_specs(self.dtype)

    def route(self, logits: Tensor, spec: RoutingSpec, correction: Tensor | None = None) -> Routing:
        return route_on_device(logits, spec, correction)

    def mix(self, x: Tensor, routing: Routing, added: Tensor | None = None) -> Tensor:
        return mix_stacked(x.contiguous(), routing, self.stacked, self.form, added)

    def summands(self, x: Tensor, routing: Routing, added: Tensor | None = None) -> Tensor | Summands:
        return summands(x.contiguous(), routing, self.stacked, self.form, added)

    def mix_adding(self, x: Tensor, routing: Routing, delta: ExpertsDelta) -> Tensor:
        return mix_adding(x.contiguous(), routing, self.stacked, self.form, delta)

    def gate_rows(self, x: Tensor, norm: tuple[Tensor, float], routing: Routing) -> Tensor:
        return expert_rows.gate_rows(x, norm, routing, self.stacked, self.form)

    def add_rows(self, inner: Tensor, routing: Routing, stream: Tensor) -> None:
        expert_rows.add_rows(inner, routing, self.stacked, self.form, stream)


class StackedExperts(DeviceExperts):
    """One tensor for each product of all experts.

    E is the number of this rank's experts.

    Attributes:
        gate_up: [E, 2 * size, hidden_size], or [E, size, hidden_size] without gates; empty before an expert is placed,
            like the others.
        down: [E, hidden_size, size].
        gate_up_bias: [E, outputs of gate_up], if there are biases.
        down_bias: [E, hidden_size], on ranks that have it.
    """

    takes_blocks = takes_codes = False

    def __init__(self, form: ExpertsForm, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(form, dtype, device)
        self.gate_up = self.down = torch.empty(0)
        self.gate_up_bias: Tensor | None = None
        self.down_bias: Tensor | None = None
        expert_tiles.compile_ahead(device, dtype)

    def prepare(
        self, expert: int, gate_up: Sequence[Mapping[str, Stored]], down: Sequence[Mapping[str, Stored]]
    ) -> None:
        count, hidden, size = len(self.form.owned), self.form.hidden_size, self.form.size
        outputs = 2 * size if self.form.gated else size
        if not len(self.down):
            expert_tiles.usable(self.device, self.dtype)
            self.gate_up = self._empty(count, outputs, hidden)
            self.down = self._empty(count, hidden, size)
        torch.cat([plain(part["weight"]) for part in gate_up], out=self.gate_up[expert])
        self.down[expert].copy_(plain(down[0]["weight"]))
        if "bias" in gate_up[0]:
            if self.gate_up_bias is None:
                self.gate_up_bias = self._empty(count, outputs)
            torch.cat([plain(part["bias"]) for part in gate_up], out=self.gate_up_bias[expert])
        if "bias" in down[0]:
            if self.down_bias is None:
                self.down_bias = self._empty(count, hidden)
            self.down_bias[expert].copy_(plain(down[0]["bias"]))

    def gate_up_of(self, expert: int, x: Tensor) -> Tensor:
        bias = None if self.gate_up_bias is None else self.gate_up_bias[expert]
        return F.linear(x, self.gate_up[expert], bias)

    def down_of(self, expert: int, x: Tensor) -> Tensor:
        bias = None if self.down_bias is None else self.down_bias[expert]
        return F.linear(x, self.down[expert], bias)

    @property
    def stacked(self) -> StackedWeights:
        return StackedWeights(self.gate_up, self.down, self.gate_up_bias, self.down_bias, self.form.owned.start)

    def _empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    @property
    def holders(self) -> tuple[object, ...]:
        return (self,)

    @property
    def nbytes(self) -> int:
        return tensor_bytes(self.gate_up, self.down, self.gate_up_bias, self.down_bias)
