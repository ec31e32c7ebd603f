"""Products of packed experts with rows that are sorted by expert on a Hopper GPU, by the CUDA kernel of
`cuda/packed_experts.cu`.

In Triton (`triton_packed_experts.py`), which serves all other cases, products wait for the widening of codes; here it
runs while other values are multiplied, and other warps copy ahead across tiles.
"""

from __future__ import annotations

import functools
import itertools
from ctypes import c_float, c_int
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from octavo.device.launch_sizes import cdiv
from octavo.nn.experts_spec import ExpertsForm
from octavo.nn.ops import nvrtc
from octavo.nn.ops.expert_weights import Kind, PackedMatrices, gate_arguments
from octavo.nn.ops.fragments import multiply_source
from octavo.nn.ops.nvrtc import Kernel, address
from octavo.nn.ops.ring import multiprocessors

HEIGHTS = (16, 32, 64, 128)
"""Rows of a tile, as `sort_kernel` lists them."""
BESIDE = 2
"""Tiles that consecutive blocks take before the next outputs."""
_GROUPS = {16: 4, 32: 4, 64: 4, 128: 3}
"""Height of a tile -> warp groups that multiply, with 64 outputs each; more rows take more registers."""
_STEP = 64
"""Inputs of a stage of rows, and 16-bit words of a stage of codes."""
_ROW_BYTES = 128
_GROUP_THREADS = 128
_ALIGNMENT = 1024
"""Of stages in shared memory."""
_LINE = 16
"""Bytes that lines of inputs, outputs and scales are multiples of."""
_SHARED = 227 * 1024
_BARRIERS = 512
_LEAST_W_STAGES = 3
_STAGED_ROWS = 64
"""Rows of results in shared memory on their way out, at most."""
_X_STAGES = {16: 16, 32: 12, 64: 8, 128: 6}
"""Height of a tile -> most stages of rows."""
_ENDLESS = 1 << 24
"""A group that no matrix fills."""
_LIMIT = 0.02
"""Largest relative error of the trial."""


class Form(NamedTuple):
    """What a kernel is compiled for; `field`, `kind` and `group` as in `PackedMatrices`."""

    first: bool
    height: int
    dtype: torch.dtype
    codes: torch.dtype
    field: int
    kind: Kind
    group: int
    minima: bool
    scales: torch.dtype
    clamped: bool
    biased: bool
    beside: int


def serves(x: Tensor, matrices: PackedMatrices, form: ExpertsForm, *, first: bool) -> bool:
    """Return whether `multiply` computes a product of these experts."""
    plain = form.gated and not form.on_inputs and (form.activation == "silu" or form.clamped is not None)
    if first and not plain:
        return False
    outputs, codes, scales = matrices.codes.shape[1] // (2 if first else 1), matrices.codes, matrices.scales
    lines = (
        matrices.inputs * x.element_size(),
        codes.shape[2] * codes.element_size(),
        outputs * scales.element_size(),
        outputs * x.element_size(),
    )
    copied = codes.is_contiguous() and scales.is_contiguous() and not any(line % _LINE for line in lines)
    alike = matrices.minima is None or matrices.minima.dtype == scales.dtype
    # Scales are rounded to the rows' dtype; float16 may not have those of others.
    in_range = x.dtype != torch.float16 or matrices.whole or scales.dtype == torch.float16
    return copied and alike and in_range and x.dtype.itemsize == 2 and usable(x.device)


@functools.cache
def usable(device: torch.device) -> bool:
    """Return whether the kernels run on a device and compute a trial right; log why not. Call it before steps are
    recorded, since it synchronizes the device."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != (9, 0):
        return False
    trial = functools.partial(_deviations, device)
    return nvrtc.trusted("Products of packed experts with several rows are computed", trial, _LIMIT)


def multiply(
    x: Tensor,
    matrices: PackedMatrices,
    bias: Tensor | None,
    form: ExpertsForm,
    top_k: int,
    order: Tensor,
    tiles: Tensor,
    out: Tensor,
    *,
    first: bool,
    height: int,
    beside: int = BESIDE,
) -> None:
    """Multiply the rows of each expert's choices by its matrix.

    Args:
        x: [T, hidden_size] if `first`, else [choices, size]; contiguous.
        bias: [E, outputs of `matrices`], or None.
        order, tiles: of `sort` in `expert_products.py`, for tiles of `height` rows, one of HEIGHTS.
        out: [choices, size], gated, if `first`, else [choices, hidden_size].
        beside: number of tiles that consecutive blocks take before the next outputs.
    """
    outputs = out.shape[1]
    alpha, limit, _ = gate_arguments(form)
    words = matrices.codes.view(torch.int16)
    width = 32 * _GROUPS[height]
    matrix = nvrtc.tiles_of(words.view(-1, words.shape[2]), width, _STEP)
    rows = matrix if first else nvrtc.tiles_of(x, height, _STEP)
    most = cdiv(len(tiles), beside) * beside * cdiv(outputs, width if first else 2 * width)
    _kernel(_form_of(x.dtype, matrices, form, bias, first=first, height=height, beside=beside)).launch(
        (min(most, multiprocessors(x.device)), 1, 1),
        [
            matrix,
            rows,
            address(x),
            address(matrices.scales),
            address(matrices.scales if matrices.minima is None else matrices.minima),
            address(matrices.scales if matrices.book is None else matrices.book),
            address(x if bias is None else bias),
            address(order),
            address(tiles),
            address(out),
            *map(c_int, (len(tiles), top_k, outputs, matrices.inputs, matrices.scales.shape[1])),
            c_float(alpha),
            c_float(limit),
        ],
    )


def compile_ahead(x: Tensor, matrices: PackedMatrices, bias: Tensor | None, form: ExpertsForm, *, first: bool) -> None:
    """Compile the kernels of a product in the background, if there are any; x is as in `serves`."""
    if serves(x, matrices, form, first=first):
        for height in HEIGHTS:
            source, macros, _ = source_of(
                _form_of(x.dtype, matrices, form, bias, first=first, height=height, beside=BESIDE)
            )
            nvrtc.compile_ahead(source, macros)


def _form_of(
    dtype: torch.dtype,
    matrices: PackedMatrices,
    form: ExpertsForm,
    bias: Tensor | None,
    *,
    first: bool,
    height: int,
    beside: int,
) -> Form:
    group = 0 if matrices.whole else _ENDLESS if matrices.scales.shape[1] == 1 else matrices.group
    return Form(
        first=first,
        height=height,
        dtype=dtype,
        codes=matrices.codes.dtype,
        field=matrices.words if matrices.fields > 1 else 1,
        kind=matrices.kind,
        group=group,
        minima=matrices.minima is not None,
        scales=matrices.scales.dtype,
        clamped=first and form.clamped is not None,
        biased=bias is not None,
        beside=beside,
    )


@functools.cache
def _kernel(form: Form) -> Kernel:
    source, macros, shared = source_of(form)
    return Kernel("packed_experts", source, macros, _GROUP_THREADS * (_GROUPS[form.height] + 1), shared)


def source_of(form: Form) -> tuple[str, dict[str, int], int]:
    """Return source, macros and bytes of shared memory."""
    bits = 4 if form.codes == torch.int16 else 8
    macros = {"BITS": bits, "GROUP": form.group, "MINIMA": int(form.minima), "HALF": int(form.dtype == torch.float16)}
    macros |= {"E4M3": int(form.codes == torch.float8_e4m3fn), "E5M2": int(form.codes == torch.float8_e5m2)}
    macros |= {"TABLE": int(form.kind == "table"), "E2M1": int(form.kind == "e2m1"), "FIELD": form.field}
    macros |= {"SCALE_BYTES": form.scales.itemsize, "BRAIN": int(form.scales == torch.bfloat16)}
    macros |= {"FIRST": int(form.first), "HEIGHT": form.height, "SIDE_BY_SIDE": form.beside}
    macros |= {"CLAMPED": int(form.clamped), "BIASED": int(form.biased)}
    groups = _GROUPS[form.height]
    span = 256 if bits == 4 else 128
    held = 0 if not form.group else max(1, span // form.group)
    factors = held * 64 * groups * form.scales.itemsize * (2 if form.minima else 1)
    w_stage = 64 * groups * _ROW_BYTES + cdiv(factors, _ALIGNMENT) * _ALIGNMENT
    x_stage, staged = form.height * _ROW_BYTES, groups * min(form.height, _STAGED_ROWS) * (64 if form.first else 128)
    room = _SHARED - _ALIGNMENT - _BARRIERS - staged
    x_stages = min(_X_STAGES[form.height], (room - _LEAST_W_STAGES * w_stage) // x_stage)
    w_stages = (room - x_stages * x_stage) // w_stage
    macros |= {"X_STAGES": x_stages, "W_STAGES": w_stages, "GROUPS": groups}
    before = nvrtc.source_of("barriers.cuh", "integers.cuh", "codes.cuh", "packed_numbers.cuh")
    before += nvrtc.source_of("packed_codes.cuh", "tile_ring.cuh", "expert_tiles.cuh")
    source = before + multiply_source(form.height, form.dtype) + nvrtc.source_of("packed_experts.cu")
    return source, macros, _ALIGNMENT + staged + x_stages * x_stage + w_stages * w_stage


def _deviations(device: torch.device) -> list[float]:
    """Return the relative errors of both products of two experts with 4 bits in groups, and with 8 bits."""
    hidden, size, rows = 320, 192, (88, 52)
    generator = torch.Generator().manual_seed(0)
    form = ExpertsForm(num_experts=2, hidden_size=hidden, size=size)
    order = torch.arange(sum(rows), dtype=torch.int32, device=device).flip(0)
    places = [(0, 0, 64), (0, 64, 24), (1, 88, 52), (0, 0, 0)]
    tiles = torch.tensor(places, device=device, dtype=torch.int32)
    x = torch.randn(sum(rows), hidden, generator=generator).to(device, torch.bfloat16)
    sizes, deviations = ((2 * size, hidden), (hidden, size)), []
    trials = [[_random(bits, *shape, generator, device) for shape in sizes] for bits in (4, 8)]
    for (one, _), first in itertools.product(trials, (True, False)):
        source, macros, _ = source_of(_form_of(x.dtype, one, form, None, first=first, height=64, beside=BESIDE))
        nvrtc.compile_ahead(source, macros)
    for gate_up, down in trials:
        inner, got = (torch.full((len(x), n), float("nan"), dtype=x.dtype, device=device) for n in (size, hidden))
        multiply(x, gate_up, None, form, 1, order, tiles, inner, first=True, height=64)
        multiply(inner, down, None, form, 1, order, tiles, got, first=False, height=64)
        for expert, chosen in enumerate(order.long().split(rows)):
            gate, up = F.linear(x[chosen].float(), gate_up.values(expert)).chunk(2, dim=-1)
            expected = F.linear(F.silu(gate) * up, down.values(expert))
            deviations.append(float((got[chosen].float() - expected).norm() / expected.norm()))
    return deviations


def _random(bits: int, outputs: int, inputs: int, generator: torch.Generator, device: torch.device) -> PackedMatrices:
    """Return random matrices of two experts, whose products have about the variance of their inputs."""
    group, words = (64, 16) if bits == 4 else (inputs, 64)
    codes = torch.randint(-128, 128, (2, outputs, inputs * bits // 8), generator=generator, dtype=torch.int8)
    scales = torch.rand(2, inputs // group, outputs, generator=generator) / ((5 if bits == 4 else 70) * inputs**0.5)
    stored = codes.to(device).view(torch.int16) if bits == 4 else codes.to(device)
    return PackedMatrices(
        stored, scales.half().to(device), None, inputs, group, words, "integers", rounds=False, dtype=torch.bfloat16
    )
