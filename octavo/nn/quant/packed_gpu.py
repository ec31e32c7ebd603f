"""Quantized weights on a GPU, kept packed and widened by the kernels that multiply with them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from octavo.nn.delta import Addition, Delta
from octavo.nn.experts_spec import ExpertsForm
from octavo.nn.ops import few_fragments, floats, fragments, packed, products, row8
from octavo.nn.ops.activation import silu_mul
from octavo.nn.ops.floats import Floats
from octavo.nn.ops.fragments import Fragments
from octavo.nn.ops.norm import rms_norm
from octavo.nn.ops.ring import RowForm
from octavo.nn.ops.words import Words
from octavo.nn.quant.base import Part, Scheme
from octavo.nn.quant.blocks import alike, dequantized, same_order
from octavo.nn.quant.coded_fragments import pack_numbers
from octavo.nn.quant.experts import ExpertsScheme
from octavo.nn.quant.floats import pack_floats, with_input_scale
from octavo.nn.quant.fragments import pack_integers
from octavo.nn.quant.gpu import OnGpu
from octavo.nn.quant.gpu_packed_experts import PackedStack
from octavo.nn.quant.integers import as_integers
from octavo.nn.quant.online import Online
from octavo.nn.rounded import Rounded
from octavo.nn.stream import StreamNorm
from octavo.nn.weights import Keep, QuantizedBlocks, Stored, fused, plain, tensor_bytes

_LAUNCHED = (1, 16, 32, 64, 128)
"""Numbers of rows that have kernels of their own."""
_CODES = {"table": "4-bit codes", "e4m3": "E4M3", "e5m2": "E5M2"}
"""Kind of numbers -> form, for messages."""


class PackedOnGpu(OnGpu):
    """A packed matrix if the checkpoint's is quantized or is to be quantized when it is loaded, else a plain one.

    Attributes:
        matrix: the packed matrix; None if it is plain.
        codes, scales, minima, order, book, inverse, joint: its tensors.
    """

    takes_blocks = takes_codes = True

    def __init__(
        self,
        dtype: torch.dtype,
        device: torch.device,
        keep: Keep = fused,
        *,
        online: Online | None = None,
        rounds: bool = False,
    ) -> None:
        """
        Args:
            online: how to quantize a plain matrix; None for not at all.
            rounds: the checkpoint's activations are rounded to 8 bits, too.
        """
        super().__init__(dtype, device, keep)
        self._online = online
        self._rounds = rounds
        self.matrix: packed.Matrix | None = None
        self.codes: Tensor | None = None
        self.scales: Tensor | None = None
        self.minima: Tensor | None = None
        self.order: Tensor | None = None
        self.book: Tensor | None = None
        self.inverse: Tensor | None = None
        self.joint: Tensor | None = None

    def prepare(self, parts: Sequence[Mapping[str, Stored]]) -> None:
        weights = [part["weight"] for part in parts]
        blocks = [weight for weight in weights if isinstance(weight, QuantizedBlocks)]
        matrix = self._packed(blocks) if len(blocks) == len(weights) and same_order(blocks) else None
        if matrix is not None:
            self._take(matrix)
        elif self._online is not None and not blocks and self._online.fits(plain(weights[0])):
            self._take(self._online.pack([plain(weight) for weight in weights]))
        else:
            values = [
                weight if isinstance(weight, Tensor) else dequantized(weight, self.dtype).to(self.device)
                for weight in weights
            ]
            super().prepare([{**part, "weight": value} for part, value in zip(parts, values, strict=True)])
            return
        if "bias" in parts[0]:
            self.bias = torch.cat([plain(part["bias"]) for part in parts])

    def _packed(self, parts: list[QuantizedBlocks]) -> packed.Matrix | None:
        """Return the parts as one matrix; None if no kernel multiplies with it."""
        matched = alike(parts)
        made = pack_floats(matched, self.device) if matched is not None and self._rounds else None
        if made is not None:
            return with_input_scale(made, parts)
        integers = as_integers(parts, self.device)
        if integers is not None:
            return pack_integers(integers, self.device, self.dtype)
        return None if matched is None else pack_numbers(matched, self.device, self.dtype)

    def share(self, weight: Stored) -> None:
        super().share(dequantized(weight, self.dtype) if isinstance(weight, QuantizedBlocks) else weight)

    def _take(self, matrix: packed.Matrix) -> None:
        self.matrix, self.codes, self.scales = matrix, matrix.codes, matrix.scales
        if not isinstance(matrix, Floats):
            self.order, self.book = matrix.order, matrix.book
        if isinstance(matrix, Fragments):
            fragments.compile_ahead(matrix, self.dtype)
            few_fragments.compile_ahead(matrix, self.dtype)
        elif isinstance(matrix, Floats):
            self.inverse, self.joint = matrix.inverse, matrix.joint
            row8.compile_rows_ahead(matrix, self.dtype)
        elif isinstance(matrix, Words):
            self.minima = matrix.minima
            packed.SCRATCH.reserve(matrix.outputs * matrix.inputs, self.dtype, self.device)

    @property
    def fused_rows(self) -> int:  # type: ignore[override]
        """Return the most rows supported by `fused`.

        In Triton, a single row of words is multiplied by matrix units, too: on an H200 that takes 60 % of the time
        of a kernel without them, which could fuse norm and gate.
        """
        if isinstance(self.matrix, Fragments):
            return int(fragments.fuses(self.matrix))
        return 0 if isinstance(self.matrix, Words) else OnGpu.fused_rows

    @property
    def is_packed(self) -> bool:  # type: ignore[override]
        return self.matrix is not None

    @property
    def packed_as(self) -> str | None:
        if self.matrix is None:
            return None
        if isinstance(self.matrix, Floats):
            form = "8-bit integers" if self.matrix.codes.dtype == torch.int8 else "8-bit floats"
            static = "" if self.inverse is None else ", static inputs"
            return f"{form} in tiles" if self.matrix.tile else f"{form}{static}"
        minima, order = " with minima" if self.matrix.has_minima else "", ", inputs reordered"
        form = _CODES.get(self.matrix.kind, f"{self.matrix.bits}-bit integers")
        return f"{form}{minima}{'' if self.order is None else order}"

    @property
    def is_rounded(self) -> bool:
        return self.matrix is not None and self._online is not None

    @property
    def multiplied(self) -> Tensor | None:
        """The plain matrix, or the memory into which the packed one is widened for many rows."""
        if isinstance(self.matrix, Words):
            return packed.SCRATCH.matrix(self.matrix.outputs, self.matrix.inputs, self.dtype, self.device)
        return self.weight

    def experts(self, form: ExpertsForm) -> ExpertsScheme:
        return PackedStack(form, self.dtype, self.device, online=self._online, rounds=self._rounds)

    def kept_bytes(self, shape: Sequence[int]) -> int | None:
        return None if self._online is None else self._online.kept_bytes(shape)

    def takes_rounded(self, rows: int) -> bool:
        return isinstance(self.matrix, Floats) and not self.matrix.tile and rows > packed.FEW_LEFT

    def round_norm(self, weight: Tensor, eps: float) -> StreamNorm[Rounded]:
        assert isinstance(self.matrix, Floats)
        return floats.RoundedNorm(weight, eps, self.matrix.rounded_dtype, self.matrix.inverse)

    def round_gated(self, gate_up: Tensor) -> Rounded:
        assert isinstance(self.matrix, Floats)
        return floats.round_gated(gate_up, self.matrix.rounded_dtype, self.matrix.inverse)

    def multiply_rounded(self, x: Rounded, dtype: torch.dtype | None = None) -> Tensor:
        assert self.matrix is not None
        return packed.product(x, self.matrix, self.bias, dtype or self.dtype)

    def apply(self, x: Tensor) -> Tensor:
        if self.matrix is None:
            return super().apply(x)
        return self.fused(x, dtype=x.dtype) if self._fuses(x) else self._product(x, self.matrix, x.dtype)

    def wide(self, x: Tensor) -> Tensor:
        return super().wide(x) if self.matrix is None else self._product(x, self.matrix, torch.float32)

    def _product(self, x: Tensor, matrix: packed.Matrix, dtype: torch.dtype) -> Tensor:
        y = packed.product(x.flatten(0, -2), matrix, self.bias, dtype)
        return y.view(*x.shape[:-1], matrix.outputs)

    def fused(
        self,
        x: Tensor,
        *,
        norm: tuple[Tensor, float] | None = None,
        gated: bool = False,
        add_to: Tensor | None = None,
        dtype: torch.dtype | None = None,
        delta: Delta | None = None,
    ) -> Tensor:
        if self.matrix is None:
            return super().fused(x, norm=norm, gated=gated, add_to=add_to, dtype=dtype, delta=delta)
        multiply = partial(self._row_product, self.matrix, dtype=dtype or self.dtype)
        if delta is None:
            return multiply(x, norm=norm, gated=gated, add_to=add_to)
        if norm is not None:
            x = rms_norm(x, *norm, self.dtype)
        addition = delta.begin(x)
        y = multiply(x, add_to=add_to)
        if gated:
            return addition.gated(y)
        addition.add_to(y)
        return y

    def _row_product(
        self,
        matrix: packed.Matrix,
        x: Tensor,
        *,
        dtype: torch.dtype,
        norm: tuple[Tensor, float] | None = None,
        gated: bool = False,
        add_to: Tensor | None = None,
    ) -> Tensor:
        if isinstance(matrix, Fragments):
            return fragments.row_product(
                x, matrix, bias=self.bias, norm=norm, gated=gated, add_to=add_to, dtype=dtype, narrow=self.dtype
            )
        assert isinstance(matrix, Floats), "words are multiplied without fusion"
        options: dict[str, Any] = {"bias": self.bias, "norm": norm, "gated": gated, "add_to": add_to, "dtype": dtype}
        if self._has_row8(matrix, norm, gated=gated):
            return row8.row_product(x, matrix, **options, narrow=self.dtype)
        return floats.row_product(x, matrix, **options)

    def _has_row8(self, matrix: Floats, norm: tuple[Tensor, float] | None, *, gated: bool) -> bool:
        """Return whether the CUDA kernel multiplies one row."""
        narrow = self.dtype.itemsize == 2 and (norm is None or norm[0].dtype == self.dtype)
        return narrow and row8.usable(self.device) and row8.fits(matrix, gated=gated)

    def gated(self, x: Tensor, addition: Addition | None = None) -> Tensor:
        if self.matrix is None:
            return super().gated(x, addition)
        if addition is not None:
            return addition.gated(self.apply(x))
        if self._fuses(x):
            return silu_mul(self.apply(x)) if self.bias is not None else self.fused(x, gated=True, dtype=x.dtype)
        y = packed.gated_product(x.flatten(0, -2), self.matrix, self.bias, x.dtype)
        return y.view(*x.shape[:-1], y.shape[1])

    def leave(self, stream: Tensor, x: Tensor) -> Tensor | None:
        matrix = self.matrix
        if matrix is None:
            return super().leave(stream, x)
        if packed.add_few(stream, x, matrix):
            return None
        parts = packed.parts(x, matrix)
        if parts is not None or not stream.shape[0]:
            return parts
        if isinstance(matrix, Floats):
            return packed.product(x, matrix, None, stream.dtype)[None]
        assert isinstance(matrix, Words), "parts of all other products are left"
        ordered = packed.in_order(x, matrix)
        products.add_linear(stream, ordered, packed.widened(matrix, ordered))
        return None

    def launch(self, outputs: int, inputs: int, gates: bool, added: bool, biased: bool, residual: torch.dtype) -> None:
        """Launch the kernels of a layer of these sizes, with a matrix of zeros, if it would be quantized online."""
        weight = torch.zeros(outputs, inputs, dtype=self.dtype, device=self.device)
        if self._online is None or not self._online.fits(weight):
            return
        layer = PackedOnGpu(self.dtype, self.device, online=self._online)
        layer.prepare([{"weight": weight, **({"bias": weight[:, 0].contiguous()} if biased else {})}])
        assert layer.matrix is not None
        if isinstance(layer.matrix, Fragments):
            layer._compile_row(layer.matrix, gates=gates, added=added, residual=residual)
            return
        for rows in _LAUNCHED:
            if rows == 1 and isinstance(layer.matrix, Floats) and layer._has_row8(layer.matrix, None, gated=gates):
                layer._compile_row(layer.matrix, gates=gates, added=added, residual=residual)
                continue
            x, stream = weight.new_zeros(rows, inputs), weight.new_zeros(rows, outputs, dtype=residual)
            if rows <= layer.fused_rows:
                if added:
                    layer.fused(x, add_to=stream)
                else:
                    layer.fused(x.to(residual), norm=(weight[0], 1e-5), gated=gates)
            elif isinstance(layer.matrix, Words) and rows > packed.FEW_WORDS:
                packed.widened(layer.matrix, x)
            elif isinstance(layer.matrix, Floats) and rows > packed.FEW_FLOATS:
                self._launch_rounding(layer.matrix, x, stream, outputs, gates=gates, added=added)
            elif added and residual == self.dtype:
                packed.parts(x, layer.matrix)
            else:
                layer.apply(x)

    def _compile_row(self, matrix: Fragments | Floats, *, gates: bool, added: bool, residual: torch.dtype) -> None:
        """Compile the kernel of one row in the background."""
        wide, biased = residual == torch.float32, self.bias is not None
        fused = RowForm(
            gated=gates and not biased,
            normed=not added,
            biased=biased,
            added=added,
            x_float=wide and not added,
            out_float=wide and added,
        )
        if isinstance(matrix, Fragments):
            fragments.compile_row_ahead(matrix, self.dtype, fused)
        else:
            row8.compile_ahead(matrix, self.dtype, fused)

    def _launch_rounding(
        self, matrix: Floats, x: Tensor, stream: Tensor, outputs: int, *, gates: bool, added: bool
    ) -> None:
        """Launch the kernels that round rows before and after a layer."""
        dtype, inverse = matrix.rounded_dtype, matrix.inverse
        if dtype == torch.int8:
            packed.product(floats.round_rows(x, dtype), matrix, None, self.dtype)
        if added:
            floats.round_rows(x, dtype, inverse)
            return
        norm = floats.RoundedNorm(x[0], 1e-5, dtype, inverse)
        start = x.to(stream.dtype)
        norm(start)
        norm.add(x.clone(), start)
        if gates:
            floats.round_gated(x.new_zeros(x.shape[0], outputs), dtype, inverse)

    @property
    def nbytes(self) -> int:
        own = self.codes, self.scales, self.minima, self.order, self.book, self.inverse, self.joint
        return super().nbytes + tensor_bytes(*own)


@dataclass(frozen=True, slots=True)
class PackedSchemes:
    """`Schemes` of a GPU: packed matrices for linear layers, plain ones for tables of embeddings and heads that share
    them.

    Attributes:
        online: how to quantize plain matrices, except an output head's, when they are loaded; None for not at all.
        rounds: the checkpoint's activations are rounded to 8 bits, too.
    """

    dtype: torch.dtype
    device: torch.device
    keep: Keep = fused
    online: Online | None = None
    rounds: bool = False

    def at(self, path: str, parts: Sequence[Part]) -> Scheme:
        name = parts[0].name
        if not name:
            return OnGpu(self.dtype, self.device, self.keep)
        online = None if name == "lm_head" else self.online
        return PackedOnGpu(self.dtype, self.device, self.keep, online=online, rounds=self.rounds)
