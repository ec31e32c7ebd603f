"""A model's weights as the native kernels want them, taken from its layers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from octavo.models.decoder import DecoderLayer
from octavo.native.bindings import Dtype
from octavo.nn.attention.native import DTYPES
from octavo.nn.embedding import Embedding, TiedHead
from octavo.nn.linear import Linear
from octavo.nn.norm import RMSNorm
from octavo.nn.quant.blocks import BlockQuantized
from octavo.nn.quant.none import Unquantized
from octavo.nn.quant.panels import interleave, pack_, pack_blocks, pad_bias
from octavo.nn.weights import tensor_bytes


@dataclass(slots=True)
class Matrix:
    """A linear layer's panels. `rows` counts outputs, `columns` inputs; integers have a zero point and maybe minima."""

    dtype: Dtype
    rows: int
    columns: int
    weight: Tensor
    bias: Tensor | None = None
    zero_point: int = 0
    minima: bool = False

    @property
    def is_integers(self) -> bool:
        """Whether it stays the integers that the checkpoint has."""
        return self.dtype in (Dtype.INT4, Dtype.INT8)

    @property
    def nbytes(self) -> int:
        return tensor_bytes(self.weight, self.bias)


@dataclass(slots=True)
class LayerWeights:
    """One decoder layer. Norms are float32."""

    input_norm: Tensor
    qkv: Matrix
    q_norm: Tensor | None
    k_norm: Tensor | None
    out: Matrix
    post_norm: Tensor
    gate_up: Matrix
    down: Matrix

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        return (self.qkv, self.out, self.gate_up, self.down)

    @property
    def nbytes(self) -> int:
        norms = tensor_bytes(self.input_norm, self.q_norm, self.k_norm, self.post_norm)
        return norms + sum(matrix.nbytes for matrix in self.matrices)


def layer_weights(layer: DecoderLayer) -> LayerWeights:
    attention, mlp = layer.attention, layer.mlp
    return LayerWeights(
        input_norm=norm_of(layer.input_norm),
        qkv=matrix_of(attention.qkv),
        q_norm=None if attention.q_norm is None else norm_of(attention.q_norm),
        k_norm=None if attention.k_norm is None else norm_of(attention.k_norm),
        out=matrix_of(attention.out),
        post_norm=norm_of(layer.post_norm),
        gate_up=matrix_of(mlp.gate_up, paired=True),
        down=matrix_of(mlp.down),
    )


def matrix_of(layer: nn.Module, *, paired: bool = False) -> Matrix:
    """A layer's weights, which it loses; `paired` puts the panels of its two parts in turns, for the gate."""
    assert isinstance(layer, Linear | TiedHead)
    scheme = layer.scheme
    assert isinstance(scheme, Unquantized)
    bias = None if scheme.bias is None else pad_bias(scheme.bias)
    if bias is not None and paired:
        bias = interleave(*bias.chunk(2))
    scheme.bias = None
    if isinstance(scheme, BlockQuantized) and scheme.packed is not None:
        panels = scheme.packed
        matrix = Matrix(_integers(scheme.bits), *scheme.shape, panels, bias, scheme.zero_point, scheme.has_minima)
        scheme.packed = None
    else:
        weight = scheme.weight
        assert weight is not None, "weights are not loaded"
        panels = pack_(weight)
        matrix = Matrix(DTYPES[weight.dtype], *weight.shape, panels, bias)
        scheme.weight = None
    if paired:
        panels.copy_(interleave(*panels.chunk(2)))
    if isinstance(layer, TiedHead):
        layer.release_source()
    return matrix


def table_of(embedding: Embedding) -> Matrix:
    """The embedding table of a model with a head of its own: plain, or integers in panels."""
    weight = embedding.weight
    if isinstance(weight, Tensor):
        return Matrix(DTYPES[weight.dtype], *weight.shape, weight)
    embedding.weight = torch.empty(0)
    return Matrix(
        _integers(weight.bits),
        *weight.values.shape,
        pack_blocks(weight),
        zero_point=weight.zero_point,
        minima=weight.minima is not None,
    )


def norm_of(layer: RMSNorm) -> Tensor:
    return layer.weight.float().contiguous()


def _integers(bits: int) -> Dtype:
    return Dtype.INT4 if bits == 4 else Dtype.INT8
