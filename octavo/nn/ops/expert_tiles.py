"""Products of experts with many rows each on a Hopper GPU, by the CUDA kernel of `cuda/experts.cu`: of 16 bits, or of
E4M3 with rows that are rounded, too.

In Triton (`triton_experts.py`, `triton_packed_experts.py`), which serves all other cases, a program has one tile, so
that nothing is multiplied while it begins and ends; in this kernel, other warps copy ahead across tiles.
"""

from __future__ import annotations

import functools
import itertools
from ctypes import c_int
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from octavo.device.launch_sizes import cdiv
from octavo.nn.experts_spec import ExpertsForm
from octavo.nn.ops import floats, nvrtc, wgmma
from octavo.nn.ops.expert_weights import PackedMatrices, StackedWeights
from octavo.nn.ops.nvrtc import Kernel, address
from octavo.nn.ops.ring import multiprocessors
from octavo.nn.rounded import Rounded

HEIGHT = 128
"""Rows of a tile, as `sort_kernel` lists them."""
_STEP = 64
"""16-bit words of a stage's rows."""
_STAGES = 4
_CLUSTER = 2
"""Blocks that take adjacent tiles and copy matrices for each other."""
_STAGE_BYTES = 3 * 128 * 128
_SCALE_BYTES = 256 * 4
"""Of a stage, if inputs are in groups."""
_GROUP = 128
_THREADS = 384
_ALIGNMENT = 1024
"""Of tiles in shared memory."""
_LIMIT = 0.02
"""Largest relative error of the trial."""


class Form(NamedTuple):
    """What a kernel is compiled for; `dtype` is of activations."""

    first: bool
    dtype: torch.dtype
    rounded: bool = False
    grouped: bool = False
    tiled: bool = False

    @property
    def shared(self) -> int:
        return _STAGES * (_STAGE_BYTES + (_SCALE_BYTES if self.grouped else 0)) + _ALIGNMENT


def serves(x: Tensor, stacked: StackedWeights, form: ExpertsForm) -> bool:
    """Return whether `multiply` computes both products of these experts."""
    if not isinstance(stacked.gate_up, Tensor) or not isinstance(stacked.down, Tensor):
        return False
    biased = stacked.gate_up_bias is not None or stacked.down_bias is not None
    divides = form.hidden_size % _STEP == 0 and form.size % _STEP == 0
    whole = stacked.gate_up.is_contiguous() and stacked.down.is_contiguous()
    return _plain(form) and divides and whole and not biased and usable(x.device, x.dtype)


def serves_rounded(x: Tensor, matrices: PackedMatrices, form: ExpertsForm, *, first: bool) -> bool:
    """Return whether `multiply_rounded` computes a product of these experts."""
    outputs = matrices.codes.shape[1] // (2 if first else 1)
    eight = matrices.rounds and matrices.codes.dtype == floats.DTYPE and matrices.scales.dtype == torch.float32
    grouped = matrices.whole or (matrices.group == _GROUP and matrices.minima is None)
    divides = matrices.inputs % _GROUP == 0 and outputs % _STEP == 0
    whole = matrices.codes.is_contiguous() and matrices.scales.is_contiguous()
    return eight and grouped and divides and whole and _plain(form) and not form.bias and rounds(x.device, x.dtype)


def _plain(form: ExpertsForm) -> bool:
    return form.gated and form.activation == "silu" and form.clamped is None and not form.on_inputs


@functools.cache
def usable(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether the kernel runs on a device and computes a trial right; log why not. Call it before steps are
    recorded, since it synchronizes the device."""
    trial = functools.partial(_deviations, device, dtype)
    return _runs(device, dtype) and nvrtc.trusted("Products of experts with many rows are computed", trial, _LIMIT)


@functools.cache
def rounds(device: torch.device, dtype: torch.dtype) -> bool:
    """Return the same of the kernel for E4M3."""
    trial = functools.partial(_rounded_deviations, device, dtype)
    purpose = "Products of experts with many rounded rows are computed"
    return _runs(device, dtype) and nvrtc.trusted(purpose, trial, _LIMIT)


def _runs(device: torch.device, dtype: torch.dtype) -> bool:
    return device.type == "cuda" and dtype.itemsize == 2 and torch.cuda.get_device_capability(device) == (9, 0)


def multiply(x: Tensor, weight: Tensor, top_k: int, order: Tensor, tiles: Tensor, out: Tensor, *, first: bool) -> None:
    """Multiply the rows of each expert's choices by its matrix.

    Args:
        x: [T, hidden_size] if `first`, else [choices, size]; contiguous, of a 16-bit dtype.
        weight: [E, 2 * size, hidden_size] if `first`, else [E, hidden_size, size].
        order, tiles: of `sort` in `expert_products.py`, for tiles of HEIGHT rows.
        out: [choices, size], gated, if `first`, else [choices, hidden_size].
    """
    made = Form(first, x.dtype)
    _launch(made, x, x, 0, weight, x, top_k, order, tiles, out)


def multiply_rounded(
    x: Rounded,
    matrices: PackedMatrices,
    top_k: int,
    order: Tensor,
    tiles: Tensor,
    out: Tensor,
    *,
    first: bool,
) -> None:
    """The same of matrices of E4M3.

    Args:
        x: of `floats.round_rows`, or of `floats.round_groups` if matrices have groups.
    """
    grouped = not matrices.whole
    tiled = grouped and matrices.tiled and out.shape[1] % _GROUP == 0
    made = Form(first, out.dtype, rounded=True, grouped=grouped, tiled=tiled)
    stride = x.own_scales.stride(1) if grouped else 0
    _launch(made, x.codes, x.own_scales, stride, matrices.codes, matrices.scales, top_k, order, tiles, out)


def _launch(
    made: Form,
    x: Tensor,
    x_scales: Tensor,
    x_stride: int,
    weight: Tensor,
    scales: Tensor,
    top_k: int,
    order: Tensor,
    tiles: Tensor,
    out: Tensor,
) -> None:
    outputs, inputs = out.shape[1], x.shape[1]
    words = weight.view(-1, inputs), x
    if made.rounded:
        words = words[0].view(torch.int16), x.view(torch.int16)
    matrix = nvrtc.tiles_of(words[0], HEIGHT, _STEP)
    rows = [matrix] * 2 if made.first else [nvrtc.tiles_of(words[1], count, _STEP) for count in (HEIGHT // 2, 8)]
    columns = cdiv(outputs, 128 if made.first else 256)
    most = cdiv(len(tiles), _CLUSTER) * columns
    _kernel(made).launch(
        (min(most, multiprocessors(x.device) // _CLUSTER) * _CLUSTER, 1, 1),
        [
            matrix,
            *rows,
            address(x),
            address(x_scales),
            address(scales),
            address(order),
            address(tiles),
            address(out),
            *map(c_int, (len(tiles), top_k, outputs, inputs, x_stride)),
        ],
    )


def compile_ahead(device: torch.device, dtype: torch.dtype) -> None:
    """Compile the kernels in the background."""
    if _runs(device, dtype):
        for first in (True, False):
            nvrtc.compile_ahead(*source_of(Form(first, dtype)))


def _deviations(device: torch.device, dtype: torch.dtype) -> list[float]:
    """Return the relative errors of both products of two experts, one of them with less than half a tile."""
    hidden, size, rows = 256, 192, (168, 132)
    generator = torch.Generator(device).manual_seed(0)
    x, gate_up, down = (
        torch.randn(shape, generator=generator, device=device).to(dtype)
        for shape in ((sum(rows), hidden), (2, 2 * size, hidden), (2, hidden, size))
    )
    order = torch.arange(sum(rows), device=device, dtype=torch.int32).flip(0)
    places = [(0, 0, 128), (0, 128, 40), (1, 168, 128), (1, 296, 4), (0, 0, 0)]
    tiles = torch.tensor(places, device=device, dtype=torch.int32)
    inner = torch.full((sum(rows), size), float("nan"), device=device, dtype=dtype)
    got = torch.full((sum(rows), hidden), float("nan"), device=device, dtype=dtype)
    multiply(x, gate_up, 1, order, tiles, inner, first=True)
    multiply(inner, down, 1, order, tiles, got, first=False)
    deviations = []
    for expert, own in enumerate(order.long().split(rows)):
        gate, up = F.linear(x[own].float(), gate_up[expert].float()).chunk(2, dim=-1)
        expected = F.linear(F.silu(gate) * up, down[expert].float())
        deviations.append(float((got[own].float() - expected).norm() / expected.norm()))
    return deviations


def _rounded_deviations(device: torch.device, dtype: torch.dtype) -> list[float]:
    """Return the same of matrices of E4M3, with a scale for each output, and in groups."""
    hidden, size, rows = 256, 128, (168, 132)
    generator = torch.Generator(device).manual_seed(0)
    x = torch.randn(sum(rows), hidden, generator=generator, device=device).to(dtype)
    order = torch.arange(sum(rows), device=device, dtype=torch.int32).flip(0)
    places = [(0, 0, 128), (0, 128, 40), (1, 168, 128), (1, 296, 4), (0, 0, 0)]
    tiles = torch.tensor(places, device=device, dtype=torch.int32)
    deviations = []
    forms = (False, False), (True, False), (True, True)
    for first, (grouped, tiled) in itertools.product((True, False), forms):
        nvrtc.compile_ahead(*source_of(Form(first, dtype, rounded=True, grouped=grouped, tiled=tiled)))
    for grouped, tiled in forms:
        gate_up, down = (
            _random(*shape, generator, device, dtype, grouped=grouped, tiled=tiled)
            for shape in ((2 * size, hidden), (hidden, size))
        )
        inner = torch.full((sum(rows), size), float("nan"), device=device, dtype=dtype)
        got = torch.full((sum(rows), hidden), float("nan"), device=device, dtype=dtype)
        multiply_rounded(rounded_for(x, gate_up), gate_up, 1, order, tiles, inner, first=True)
        multiply_rounded(rounded_for(inner, down), down, 1, order, tiles, got, first=False)
        given, between = _values(rounded_for(x, gate_up), x), _values(rounded_for(inner, down), inner)
        for expert, own in enumerate(order.long().split(rows)):
            places_of = torch.arange(len(x), device=device).split(rows)[expert]
            gate, up = F.linear(given[own], gate_up.values(expert)).chunk(2, dim=-1)
            expected = F.silu(gate) * up
            deviations.append(float((inner[places_of].float() - expected).norm() / expected.norm()))
            expected = F.linear(between[places_of], down.values(expert))
            deviations.append(float((got[own].float() - expected).norm() / expected.norm()))
    return deviations


def rounded_for(x: Tensor, matrices: PackedMatrices) -> Rounded:
    """Return rows rounded to the codes' dtype, with a scale each, or for each group of the matrices."""
    if matrices.whole:
        return floats.round_rows(x, matrices.codes.dtype)
    return floats.round_groups(x)


def _values(rounded: Rounded, x: Tensor) -> Tensor:
    scales = rounded.own_scales[: len(x)].float().view(len(x), -1)
    return rounded.codes[: len(x)].float() * scales.repeat_interleave(x.shape[1] // scales.shape[1], 1)


def _random(
    outputs: int,
    inputs: int,
    generator: torch.Generator,
    device: torch.device,
    dtype: torch.dtype,
    *,
    grouped: bool,
    tiled: bool,
) -> PackedMatrices:
    codes = torch.randn(2, outputs, inputs, generator=generator, device=device).to(floats.DTYPE)
    group = _GROUP if grouped else inputs
    scales = (torch.rand(2, inputs // group, outputs, generator=generator, device=device) + 0.5) / inputs**0.5
    if tiled:
        scales = scales[..., ::_GROUP].repeat_interleave(_GROUP, 2)
    sizes = inputs, group, _GROUP
    return PackedMatrices(codes, scales, None, *sizes, kind="integers", rounds=True, dtype=dtype, tiled=tiled)


@functools.cache
def _kernel(made: Form) -> Kernel:
    return Kernel("experts", *source_of(made), _THREADS, made.shared, _CLUSTER)


def source_of(made: Form) -> tuple[str, dict[str, int]]:
    """Return source and macros."""
    macros = {"FIRST": int(made.first), "SIDE_BY_SIDE": _CLUSTER, "STAGES": _STAGES}
    macros |= {"HALF": int(made.dtype == torch.float16), "ROUNDED": int(made.rounded), "GROUPED": int(made.grouped)}
    macros |= {"TILED": int(made.tiled), "CLUSTER": _CLUSTER}
    before = nvrtc.source_of("barriers.cuh", "tile_ring.cuh", "cluster_tiles.cuh", "expert_tiles.cuh")
    instruction = _EIGHT_BITS if made.rounded else wgmma.tile_source("multiply", 256, made.dtype)
    return before + instruction + nvrtc.source_of("experts.cu"), macros


_EIGHT_BITS = f"""
// acc [64, 128] += rows [64, 32] @ matrix [128, 32]^T of 8 bits in shared memory; without `more` these are the first.
__device__ __forceinline__ void multiply(float* acc, unsigned long long rows, unsigned long long matrix, bool more) {{
  asm volatile("{{.reg .pred p; setp.ne.b32 p, %66, 0; "
               "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 "
               "{{{wgmma.numbered(0, 64)}}}, %64, %65, p, 1, 1;}}"
               : {wgmma.operands("acc", 64)}
               : "l"(rows), "l"(matrix), "r"((int)more));
}}
"""
