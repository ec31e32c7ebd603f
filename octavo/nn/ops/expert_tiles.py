"""Products of experts with many rows each on a Hopper GPU, by the CUDA kernel of `cuda/experts.cu`.

In Triton (`triton_experts.py`), which serves all other cases, a program has one tile, so that nothing is multiplied
while it begins and ends; in this kernel, other warps copy ahead across tiles.
"""

from __future__ import annotations

import functools
from ctypes import c_int

import torch
from torch import Tensor
from torch.nn import functional as F

from octavo.device.launch_sizes import cdiv
from octavo.nn.experts_spec import ExpertsForm
from octavo.nn.ops import nvrtc
from octavo.nn.ops.expert_weights import StackedWeights
from octavo.nn.ops.nvrtc import Kernel, address

HEIGHT = 128
"""Rows of a tile, as `sort_kernel` lists them."""
_STEP = 64
_STAGES = 4
_STAGE_BYTES = 3 * 128 * 128
_THREADS = 384
_ALIGNMENT = 1024
"""Of tiles in shared memory."""
_SUMS = 128
"""Sums of a thread: 64 rows by 256 outputs in 128 threads."""
_LIMIT = 0.02
"""Largest relative error of the trial."""


def serves(x: Tensor, stacked: StackedWeights, form: ExpertsForm) -> bool:
    """Return whether `multiply` computes both products of these experts."""
    if not isinstance(stacked.gate_up, Tensor) or not isinstance(stacked.down, Tensor):
        return False
    plain = form.gated and form.activation == "silu" and form.clamped is None and not form.on_inputs
    biased = stacked.gate_up_bias is not None or stacked.down_bias is not None
    divides = form.hidden_size % _STEP == 0 and form.size % _STEP == 0
    whole = stacked.gate_up.is_contiguous() and stacked.down.is_contiguous()
    return plain and divides and whole and not biased and usable(x.device, x.dtype)


@functools.cache
def usable(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether the kernel runs on a device and computes a trial right; log why not. Call it before steps are
    recorded, since it synchronizes the device."""
    if device.type != "cuda" or dtype.itemsize != 2 or torch.cuda.get_device_capability(device) != (9, 0):
        return False
    return nvrtc.trusted(
        "Products of experts with many rows are computed", functools.partial(_deviations, device, dtype), _LIMIT
    )


def multiply(
    x: Tensor, weight: Tensor, top_k: int, order: Tensor, tiles: Tensor, out: Tensor, *, first: bool, beside: int = 2
) -> None:
    """Multiply the rows of each expert's choices by its matrix.

    Args:
        x: [T, hidden_size] if `first`, else [choices, size]; contiguous, of a 16-bit dtype.
        weight: [E, 2 * size, hidden_size] if `first`, else [E, hidden_size, size].
        order, tiles: of `sort` in `expert_products.py`, for tiles of HEIGHT rows.
        out: [choices, size], gated, if `first`, else [choices, hidden_size].
        beside: number of tiles that consecutive blocks take before the next outputs.
    """
    outputs, inputs = out.shape[1], x.shape[1]
    matrix = nvrtc.tiles_of(weight.view(-1, inputs), HEIGHT, _STEP)
    rows = matrix if first else nvrtc.tiles_of(x, HEIGHT // 2, _STEP)
    columns = cdiv(outputs, 128 if first else 256)
    most = cdiv(len(tiles), beside) * beside * columns
    _kernel(first, beside, x.dtype).launch(
        (min(most, _multiprocessors(x.device)), 1, 1),
        [
            matrix,
            rows,
            address(x),
            address(order),
            address(tiles),
            address(out),
            *map(c_int, (len(tiles), top_k, outputs, inputs)),
        ],
    )


def compile_ahead(device: torch.device, dtype: torch.dtype) -> None:
    """Compile the kernels in the background."""
    if device.type == "cuda" and dtype.itemsize == 2 and torch.cuda.get_device_capability(device) == (9, 0):
        for first in (True, False):
            nvrtc.compile_ahead(*_source(first, 2, dtype))


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


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def _kernel(first: bool, beside: int, dtype: torch.dtype) -> Kernel:
    return Kernel("experts", *_source(first, beside, dtype), _THREADS, _STAGES * _STAGE_BYTES + _ALIGNMENT)


def _source(first: bool, beside: int, dtype: torch.dtype) -> tuple[str, dict[str, int]]:
    macros = {"FIRST": int(first), "SIDE_BY_SIDE": beside, "STAGES": _STAGES, "HALF": int(dtype == torch.float16)}
    before = nvrtc.source_of("barriers.cuh", "expert_tiles.cuh")
    return before + _instruction(dtype) + nvrtc.source_of("experts.cu"), macros


def _instruction(dtype: torch.dtype) -> str:
    """Return the source of `multiply`: acc [64, 256] += rows [64, 16] @ matrix [256, 16]^T in shared memory, by the
    matrix units of a warp group.

    https://docs.nvidia.com/cuda/parallel-thread-execution/#asynchronous-warpgroup-level-matrix-instructions-wgmma-mma
    """
    kind = "f16" if dtype == torch.float16 else "bf16"
    targets = ", ".join(f"%{i}" for i in range(_SUMS))
    operands = ", ".join(f'"+f"(acc[{i}])' for i in range(_SUMS))
    return f"""
__device__ __forceinline__ void multiply(float* acc, unsigned long long rows, unsigned long long matrix) {{
  asm volatile("wgmma.mma_async.sync.aligned.m64n256k16.f32.{kind}.{kind} "
               "{{{targets}}}, %{_SUMS}, %{_SUMS + 1}, 1, 1, 1, 0, 0;"
               : {operands}
               : "l"(rows), "l"(matrix));
}}
"""
