"""Inputs of single layers besides the residual stream: embeddings per layer."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from octavo.models.spec import DecoderSpec
from octavo.native.bindings import Dtype, Epilogue, Function
from octavo.native.builder import RESIDUAL, ProgramBuilder, Results
from octavo.nn.build import Build
from octavo.nn.ops.activation import ACTIVATIONS
from octavo.nn.shard import NONE
from octavo.nn.stream import Stream

_HALF = 2.0**-0.5
_INPUTS, _GATED = "layer inputs", "layer input: gated"


class LayerInputs(nn.Module):
    """Makes the inputs of all layers: (norm(projection(x)) + table[id]) / sqrt(2)."""

    if TYPE_CHECKING:

        def __call__(self, x: Tensor, ids: Tensor, /) -> Tensor: ...

    def __init__(self, b: Build, spec: DecoderSpec) -> None:
        """`b`: at the place of the base model."""
        super().__init__()
        own = spec.layer_inputs
        assert own is not None
        self.size, self.layers, self.dtype = own.size, spec.num_layers, b.dtype
        width = self.size * self.layers
        # Models are trained with this factor in their own dtype.
        self.multiplier = torch.tensor(self.size**0.5, dtype=b.dtype).item()
        self.factor = spec.hidden_size**-0.5
        self.table = b.embedding("embed_tokens_per_layer", own.rows, width, plain=True)
        self.projection = b.linear("per_layer_model_projection", inputs=spec.hidden_size, outputs=width, shard=NONE)
        self.norm = b.norm("per_layer_projection_norm", self.size, spec.norm.eps)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        """Return the inputs, [T, layers, size], for embeddings x [T, hidden_size] and ids [T] int64."""
        projected = self.norm(self.projection(x.to(self.dtype)).mul_(self.factor).unflatten(1, (-1, self.size)))
        found = self.table(ids).to(self.dtype).mul_(self.multiplier).view_as(projected)
        return projected.add_(found).mul_(_HALF)

    def pack(self) -> None:
        """Convert the table for `emit`."""
        self.table.pack()

    def emit(self, b: ProgramBuilder) -> None:
        """Add it to a native program, at the place where the residual stream has the embeddings."""
        width = self.size * self.layers
        inputs = b.scratch(_INPUTS, self.projection.matrix.rows * 4)
        found = b.scratch("layer inputs: found", width * 4)
        self.projection.emit(b, RESIDUAL, Dtype.FLOAT, inputs, Results(scale=self.factor))
        self.norm.emit_in_place(b, inputs, 0, width)
        b.copy(inputs, inputs, width, scale=_HALF)
        self.table.emit_lookup(b, self.multiplier, output=found)
        b.copy(found, inputs, width, scale=_HALF, epilogue=Epilogue.ADD)


class LayerInput(nn.Module):
    """The part of a layer that adds its input: norm(projection(act(gate(x)) * input)) to the residual stream x."""

    if TYPE_CHECKING:

        def __call__(self, stream: Stream, given: Tensor, /) -> None: ...

    def __init__(self, b: Build, spec: DecoderSpec, layer: int) -> None:
        """`b`: at the place of the layer."""
        super().__init__()
        own, hidden = spec.layer_inputs, spec.hidden_size
        assert own is not None
        self.size, self.layer, self.dtype = own.size, layer, b.dtype
        self.activation, self._function = ACTIVATIONS[own.activation], Function[own.activation.upper()]
        self.gate = b.linear("per_layer_input_gate", inputs=hidden, outputs=self.size, shard=NONE)
        self.out = b.linear("per_layer_projection", inputs=self.size, outputs=hidden, shard=NONE)
        self.norm = b.norm("post_per_layer_input_norm", hidden, spec.norm.eps)

    def forward(self, stream: Stream, given: Tensor) -> None:
        """Add the input `given`, [T, size]."""
        gated = self.activation(self.gate(stream.total().to(self.dtype))).mul_(given)
        stream.add_later(self.norm(self.out(gated)))

    def emit_kept(self, b: ProgramBuilder, kept: int, begin: int) -> None:
        """Copy the input, in a native program, to a buffer from which `emit` takes it, from value `begin` on."""
        b.copy(b.scratch(_INPUTS, 0), kept, self.size, first=self.layer * self.size, begin=begin)

    def emit(self, b: ProgramBuilder, kept: tuple[int, int] | None = None) -> None:
        """Add it to a native program. `kept`: where `emit_kept` has put the input; None if it is where it was made."""
        source, first = (b.scratch(_INPUTS, 0), self.layer * self.size) if kept is None else kept
        gated = b.scratch(_GATED, self.gate.matrix.rows * 4)
        self.gate.emit(b, RESIDUAL, Dtype.FLOAT, gated, Results(function=self._function))
        b.copy(source, gated, self.size, first=first, epilogue=Epilogue.GATE)
        self.out.emit_into(b, gated, Dtype.FLOAT, self.norm)
