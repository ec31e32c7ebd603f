"""Products with a matrix of 8-bit numbers on a GPU: floating-point, or integers.

Few rows are multiplied unrounded by the widened matrix. More rows are rounded to 8 bits, too, each with a scale of its
own or all with the checkpoint's, and multiplied by units for such numbers, at twice the rate of 16 bits.
"""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import ScalingType, scaled_mm
from triton.tools.tensor_descriptor import TensorDescriptor

from octavo.device.launch_sizes import cdiv, next_power_of_2
from octavo.nn.ops.triton_floats import (
    floats_row_kernel,
    floats_rows_kernel,
    gate_round_kernel,
    integers_kernel,
    norm_round_kernel,
    round_groups_kernel,
    round_kernel,
)
from octavo.nn.ops.triton_overlap import overlap
from octavo.nn.ops.triton_sum import sum_parts
from octavo.nn.rounded import Rounded
from octavo.nn.stream import Summands

DTYPE = torch.float8_e4m3fn
LARGEST = {DTYPE: 448.0, torch.int8: 127.0}
"""Dtype of rounded numbers -> the largest."""
TILE = 128
"""Outputs and inputs of a tile that has a scale."""
log = logging.getLogger(__name__)

_ROUNDED = 0.06
"""Largest relative error of a trial with rows rounded to E4M3."""
_BAND = 8
_SMALL = 64
"""Most rows of integers whose tiles are small."""
_BUSY = 90
"""Fewest programs with large tiles of integers."""
_MOST_ROWS = 64
"""Of a tile of a product of unrounded rows."""
_PROGRAMS = 400
"""Programs of a product that keep an H200 busy."""
_ONES = 1 << 16
"""Scales of rows that are kept."""


@dataclass(frozen=True, slots=True)
class Floats:
    """A matrix [N, K].

    Attributes:
        codes: [N, K] E4M3, E5M2 or int8.
        scales: factors in float32: [N], or of tiles, [ceil(N / 128), ceil(K / 128), rounded up to a multiple of 4].
        inverse: [1] float32, by which all rows are multiplied before they are rounded; None: each row has a scale of
            its own. It is read on the device, since recorded steps must find that of weights that replace these.
        joint: [N] float32: `scales` divided by `inverse`.
    """

    codes: Tensor
    scales: Tensor
    inverse: Tensor | None = None
    joint: Tensor | None = None

    @property
    def outputs(self) -> int:
        return self.codes.shape[0]

    @property
    def inputs(self) -> int:
        return self.codes.shape[1]

    @property
    def tile(self) -> int:
        """Outputs and inputs of a tile that has a scale; 0 if outputs have."""
        return TILE if self.scales.dim() == 2 else 0

    @property
    def rounded_dtype(self) -> torch.dtype:
        """The dtype to which rows are rounded before they are multiplied."""
        return torch.int8 if self.codes.dtype == torch.int8 else DTYPE

    def with_input_scale(self, scale: float) -> Floats:
        """Return the matrix, of E4M3 with scales of outputs, for rows that are rounded after division by a scale."""
        device = self.codes.device
        _kept_ones(device)  # not in a step, which may be recorded
        inverse = torch.tensor([1.0 / scale], dtype=torch.float32, device=device)
        return replace(self, inverse=inverse, joint=self.scales * scale)

    def values(self) -> Tensor:
        """Return the matrix's values [N, K] in float32."""
        if not self.tile:
            return self.codes.float() * self.scales[:, None]
        scales = self.scales.repeat_interleave(TILE, 0)[: self.outputs].repeat_interleave(TILE, 1)[:, : self.inputs]
        return self.codes.float() * scales


class RowPlan(NamedTuple):
    """Matrix rows of a program, columns of a pass, warps; columns of each matrix row that are prefetched."""

    block_n: int
    block_k: int
    warps: int
    ahead: int = 0


class RowsPlan(NamedTuple):
    """How programs divide a product of several rows; `parts` programs share an output's inputs."""

    block_m: int
    block_n: int
    block_k: int
    parts: int
    warps: int
    stages: int


def rounded(weight: Tensor, dtype: torch.dtype = DTYPE) -> Floats:
    """Round a matrix [N, K] to E4M3 or int8, with a scale for each output."""
    largest = weight.abs().amax(1, keepdim=True).float().clamp_min(1e-12)
    scales = largest / LARGEST[dtype]
    codes = (weight.float() / scales).clamp(-LARGEST[dtype], LARGEST[dtype])
    return Floats((codes if dtype.is_floating_point else codes.round()).to(dtype), scales.flatten())


def row_product(
    x: Tensor,
    floats: Floats,
    *,
    bias: Tensor | None = None,
    norm: tuple[Tensor, float] | None = None,
    gated: bool = False,
    add_to: Tensor | None = None,
    dtype: torch.dtype | None = None,
    plan: RowPlan | None = None,
) -> Tensor:
    """Return the product of one row; arguments and result are those of `few_rows.fused_product`."""
    outputs = floats.outputs // 2 if gated else floats.outputs
    out = add_to
    if out is None:
        out = torch.empty(1, outputs, dtype=dtype or x.dtype, device=x.device)
    scale, eps = norm if norm is not None else (x, 0.0)
    plan = plan or row_plan(floats.inputs, x.device)
    floats_row_kernel[(cdiv(outputs, plan.block_n),)](
        x,
        scale,
        floats.codes,
        floats.scales,
        x if bias is None else bias,
        out,
        out,
        eps,
        N=outputs,
        K=floats.inputs,
        BLOCK_N=plan.block_n,
        BLOCK_K=plan.block_k,
        NORMED=norm is not None,
        GATED=gated,
        BIASED=bias is not None,
        ADDED=add_to is not None,
        TILE=floats.tile,
        AHEAD=plan.ahead,
        num_warps=plan.warps,
        **overlap(x.device),
    )
    return out


def product(x: Tensor, floats: Floats, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return x [M, K], contiguous, @ W^T + bias: [M, N], rounded once to `dtype`."""
    plan = rows_plan(floats, x.shape[0], x.device)
    if plan.parts == 1 and bias is None:
        return rows_product(x, floats, plan, dtype)[0]
    return sum_parts(rows_product(x, floats, plan, torch.float32), bias, dtype)


def rows_product(x: Tensor, floats: Floats, plan: RowsPlan, dtype: torch.dtype) -> Tensor:
    """Return x [M, K], contiguous, @ W^T in parts over the inputs, whose sum it is: [plan.parts, M, N]."""
    rows, outputs = x.shape[0], floats.outputs
    out = torch.empty(plan.parts, rows, outputs, dtype=dtype, device=x.device)
    floats_rows_kernel[(cdiv(outputs, plan.block_n), plan.parts, cdiv(rows, plan.block_m))](
        x,
        floats.codes,
        floats.scales,
        out,
        rows,
        N=outputs,
        K=floats.inputs,
        BLOCK_M=plan.block_m,
        BLOCK_N=plan.block_n,
        BLOCK_K=plan.block_k,
        PARTS_OF_K=plan.parts,
        TILE=floats.tile,
        num_warps=plan.warps,
        num_stages=plan.stages,
        **overlap(x.device),
    )
    return out


def round_rows(x: Tensor, dtype: torch.dtype = DTYPE, inverse: Tensor | None = None) -> Rounded:
    """Return x [M, K], contiguous, rounded to nearest.

    Args:
        inverse: as in `Floats`, only for E4M3.
    """
    made = _empty(x.shape[0], x.shape[1], x.device, dtype, inverse)
    if x.shape[0]:
        round_kernel[(x.shape[0],)](x, *_results(made, inverse), **_by_rows(x.shape[1], x.device, dtype, inverse))
    return made


def round_groups(x: Tensor) -> Rounded:
    """Return x [M, K], contiguous, rounded to nearest with scales [M, ceil(K / 128)], whose columns are contiguous.

    M is rounded up to a multiple of 4, as the library requires; further rows have no values.
    """
    (rows, size), padded = x.shape, _multiple(x.shape[0])
    codes = torch.empty(padded, size, dtype=DTYPE, device=x.device)
    scales = torch.empty(cdiv(size, TILE), padded, dtype=torch.float32, device=x.device)
    if rows:
        block = next_power_of_2(max(size, TILE))
        round_groups_kernel[(rows,)](
            x,
            codes.view(torch.uint8),
            scales,
            padded,
            SIZE=size,
            BLOCK=block,
            GROUP=TILE,
            num_warps=max(1, min(16, block // 512)),
            **overlap(x.device),
        )
    return Rounded(codes, scales.t())


def round_gated(gate_up: Tensor, dtype: torch.dtype = DTYPE, inverse: Tensor | None = None) -> Rounded:
    """Return silu(first half) * second half of gate_up [M, 2 * K], contiguous, rounded as by `round_rows`."""
    rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    made = _empty(rows, size, gate_up.device, dtype, inverse)
    if rows:
        form = _by_rows(size, gate_up.device, dtype, inverse)
        gate_round_kernel[(rows,)](gate_up, *_results(made, inverse), **form)
    return made


class RoundedNorm:
    """A root-mean-square norm whose results are rounded as by `round_rows`, with the methods of `nn/norm.py` that a
    stream calls."""

    def __init__(self, weight: Tensor, eps: float, dtype: torch.dtype = DTYPE, inverse: Tensor | None = None) -> None:
        self._weight = weight
        self._eps = eps
        self._dtype = dtype
        self._inverse = inverse

    def __call__(self, x: Tensor) -> Rounded:
        return self._launch(x, x, x, parts=0)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Rounded, Tensor]:
        total = x if x.dtype == residual.dtype else residual.new_empty(residual.shape)
        return self._launch(x, residual, total, parts=1), total

    def after(self, parts: Tensor | None, stream: Tensor) -> Rounded:
        return self(stream) if parts is None else self._launch(parts, stream, stream, parts=parts.shape[0])

    def summed(self, summands: Summands, stream: Tensor) -> Rounded:
        stream.add_(summands.total())
        return self(stream)

    def _launch(self, x: Tensor, residual: Tensor, total: Tensor, *, parts: int) -> Rounded:
        rows, size = total.shape
        made = _empty(rows, size, total.device, self._dtype, self._inverse)
        if rows:
            form = _by_rows(size, total.device, self._dtype, self._inverse)
            results = _results(made, self._inverse)
            norm_round_kernel[(rows,)](x, residual, total, self._weight, *results, self._eps, PARTS=parts, **form)
        return made


def _empty(rows: int, size: int, device: torch.device, dtype: torch.dtype, inverse: Tensor | None) -> Rounded:
    scales = torch.empty(rows, 1, dtype=torch.float32, device=device) if inverse is None else None
    return Rounded(torch.empty(rows, size, dtype=dtype, device=device), scales)


def _results(made: Rounded, inverse: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return the arguments `out`, `scales` and `inverse` of a kernel that rounds; one of the last two is not used."""
    scales = made.own_scales if inverse is None else inverse
    return made.codes.view(torch.uint8), scales, scales


def _by_rows(size: int, device: torch.device, dtype: torch.dtype, inverse: Tensor | None) -> dict[str, Any]:
    """Return the launch options of a kernel with a program for each row."""
    block = next_power_of_2(size)
    form = {"SIZE": size, "BLOCK": block, "INTEGERS": dtype == torch.int8, "STATIC": inverse is not None}
    return {**form, "num_warps": max(1, min(16, block // 512)), **overlap(device)}


def rounded_product(x: Rounded, floats: Floats, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return x [M, K] @ W^T + bias, multiplied in 8 bits: [M, N]."""
    codes = x.codes
    if codes.dtype == torch.int8:
        return _integers(x, floats, bias, dtype)
    scales, factors = x.scales, floats.scales
    if scales is None:
        assert floats.joint is not None, "rows have the static scale of the matrix"
        scales, factors = ones(len(codes), codes.device), floats.joint
    if not codes.is_cuda:
        y = (codes.float() * scales) @ (floats.codes.float() * factors[:, None]).T
        return (y if bias is None else y + bias).to(dtype)
    wanted = torch.bfloat16 if dtype == torch.float32 else dtype
    y = torch._scaled_mm(codes, floats.codes.t(), scales, factors[None, :], out_dtype=wanted, use_fast_accum=True)
    return (y if bias is None else y.add_(bias)).to(dtype)


def ones(rows: int, device: torch.device) -> Tensor:
    """Return ones [rows, 1] in float32, not to be written to: the scales of rows, where those of outputs have their
    static one as a factor. Nothing is launched to fill them, except for more rows than steps usually have."""
    kept = _kept_ones(device)
    return kept[:rows] if rows <= len(kept) else kept.new_ones(rows, 1)


@functools.cache
def _kept_ones(device: torch.device) -> Tensor:
    """Return ones that are never freed, since recorded steps read them; first called before any is recorded."""
    return torch.ones(_ONES, 1, dtype=torch.float32, device=device)


def tiled_product(x: Tensor, floats: Floats, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return x [M, K], contiguous, @ W^T + bias: [M, N]; the rows are rounded with a scale for each 128 inputs."""
    rows, made = x.shape[0], round_groups(x)
    if not x.is_cuda:
        wide = made.codes.float() * made.own_scales.repeat_interleave(TILE, 1)[:, : floats.inputs]
        y = (wide @ floats.values().T)[:rows]
        return (y if bias is None else y + bias).to(dtype)
    y = scaled_mm(
        made.codes,
        floats.codes.t(),
        made.own_scales,
        ScalingType.BlockWise1x128,
        floats.scales.t(),
        ScalingType.BlockWise128x128,
        output_dtype=torch.bfloat16 if dtype == torch.float32 else dtype,
    )[:rows]
    return (y if bias is None else y.add_(bias)).to(dtype)


def _multiple(count: int) -> int:
    """Return a count rounded up to a multiple of 4, as the library requires of scales."""
    return -(-count // 4) * 4


def _integers(x: Rounded, floats: Floats, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return the product of rows and a matrix of integers."""
    (rows, inputs), outputs = x.codes.shape, floats.outputs
    out = torch.empty(rows, outputs, dtype=dtype, device=x.codes.device)
    plan = integers_plan(rows, outputs, out.device)
    integers_kernel[(cdiv(outputs, plan.block_n) * cdiv(rows, plan.block_m),)](
        TensorDescriptor(x.codes, [rows, inputs], [inputs, 1], [plan.block_m, plan.block_k]),
        TensorDescriptor(floats.codes, [outputs, inputs], [inputs, 1], [plan.block_n, plan.block_k]),
        x.own_scales,
        floats.scales,
        x.own_scales if bias is None else bias,
        out,
        rows,
        N=outputs,
        K=inputs,
        BLOCK_M=plan.block_m,
        BLOCK_N=plan.block_n,
        BLOCK_K=plan.block_k,
        BAND=_BAND,
        BIASED=bias is not None,
        num_warps=plan.warps,
        num_stages=plan.stages,
        **overlap(out.device),
    )
    return out


@functools.cache
def multiplies_tiles(device: torch.device) -> bool:
    """Return whether the library multiplies matrices with scales of tiles, and computes a trial right."""
    if device.type != "cuda":
        return True
    random = torch.Generator(device).manual_seed(0)
    x = torch.randn(21, 5 * TILE, generator=random, device=device, dtype=torch.bfloat16)
    codes = torch.randn(3 * TILE, 5 * TILE, generator=random, device=device).to(DTYPE)
    matrix = Floats(codes, torch.rand(3, _multiple(5), generator=random, device=device) + 0.1)
    expected = x.float() @ matrix.values().T
    try:
        made = tiled_product(x, matrix, None, torch.bfloat16).float()
        deviation = float((made - expected).norm() / expected.norm())
    except (RuntimeError, ValueError, TypeError) as error:
        log.warning("FP8 weights with scales of tiles are multiplied without rounding rows: %s", error)
        return False
    if not deviation < _ROUNDED:
        log.warning("FP8 weights with scales of tiles are multiplied without rounding rows: deviation %.2g", deviation)
    return deviation < _ROUNDED


def integers_plan(rows: int, outputs: int, device: torch.device) -> RowsPlan:
    """Return how programs divide a product of rows of integers, as measured on an H200: the largest tiles that keep
    most multiprocessors busy."""
    if device.type != "cuda":
        return RowsPlan(64, 64, 64, 1, 1, 1)
    for plan in (RowsPlan(128, 256, 128, 1, 8, 4), RowsPlan(128, 128, 128, 1, 4, 4)):
        if rows > _SMALL and cdiv(outputs, plan.block_n) * cdiv(rows, plan.block_m) >= _BUSY:
            return plan
    return RowsPlan(64, 64, 128, 1, 4, 5)


def row_plan(inputs: int, device: torch.device) -> RowPlan:
    """Return how programs divide the product of one row, as measured on an H200."""
    if device.type != "cuda":
        return RowPlan(128, 128, 1)
    return RowPlan(4, 4096, 4) if inputs % 4096 == 0 and inputs <= 8192 else RowPlan(8, 1024, 4)


def rows_plan(floats: Floats, rows: int, device: torch.device) -> RowsPlan:
    """Return how programs divide the product of several rows, as measured on an H200."""
    if device.type != "cuda":
        return RowsPlan(16 if rows <= 16 else 64, 128, 128, 2 if floats.inputs > 128 else 1, 1, 1)
    block_m = min(_MOST_ROWS, max(16, next_power_of_2(rows)))
    block_n, block_k, most = (32, 256, 2) if block_m == 16 else (64, 128, 4)
    programs = cdiv(floats.outputs, block_n) * cdiv(rows, block_m)
    wanted = min(most, _PROGRAMS // programs)
    form = (floats.tile or block_k, 1 << max(0, wanted.bit_length() - 1))
    return RowsPlan(block_m, block_n, *form, 4, 3 if block_m == 16 else 5)
