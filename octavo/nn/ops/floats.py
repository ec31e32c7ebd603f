"""Products with a matrix of 8-bit floating-point numbers on a GPU.

Few rows are multiplied unrounded by the widened matrix. More rows are rounded to 8 bits, too, each with a scale of its
own, and multiplied by units for such numbers, at twice the rate of 16 bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from octavo.nn.ops.triton_floats import (
    floats_row_kernel,
    floats_rows_kernel,
    gate_round_kernel,
    norm_round_kernel,
    round_kernel,
)
from octavo.nn.ops.triton_overlap import overlap
from octavo.nn.ops.triton_sum import sum_parts
from octavo.nn.rounded import Rounded
from octavo.nn.stream import Summands

DTYPE = torch.float8_e4m3fn
LARGEST = 448.0
_PROGRAMS = 400
"""Programs of a product that keep an H200 busy."""


@dataclass(frozen=True, slots=True)
class Floats:
    """A matrix [N, K]: codes [N, K] E4M3, times scales [N] float32."""

    codes: Tensor
    scales: Tensor

    @property
    def outputs(self) -> int:
        return self.codes.shape[0]

    @property
    def inputs(self) -> int:
        return self.codes.shape[1]


class RowPlan(NamedTuple):
    """Matrix rows of a program, columns of a pass, warps."""

    block_n: int
    block_k: int
    warps: int


class RowsPlan(NamedTuple):
    """How programs divide a product of several rows; `parts` programs share an output's inputs."""

    block_m: int
    block_n: int
    block_k: int
    parts: int
    warps: int
    stages: int


def rounded(weight: Tensor) -> Floats:
    """Round a matrix [N, K] to E4M3, with a scale for each output."""
    largest = weight.abs().amax(1, keepdim=True).float().clamp_min(1e-12)
    scales = largest / LARGEST
    return Floats((weight.float() / scales).clamp(-LARGEST, LARGEST).to(DTYPE), scales.flatten())


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
    floats_row_kernel[(triton.cdiv(outputs, plan.block_n),)](
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
    floats_rows_kernel[(triton.cdiv(outputs, plan.block_n), plan.parts, triton.cdiv(rows, plan.block_m))](
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
        num_warps=plan.warps,
        num_stages=plan.stages,
        **overlap(x.device),
    )
    return out


def round_rows(x: Tensor) -> Rounded:
    """Return x [M, K], contiguous, rounded to nearest."""
    made = _empty(x.shape[0], x.shape[1], x.device)
    if x.shape[0]:
        codes = made.codes.view(torch.uint8)
        round_kernel[(x.shape[0],)](x, codes, made.scales, **_by_rows(x.shape[1], x.device))
    return made


def round_gated(gate_up: Tensor) -> Rounded:
    """Return silu(first half) * second half of gate_up [M, 2 * K], contiguous, rounded to nearest."""
    rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    made = _empty(rows, size, gate_up.device)
    if rows:
        codes = made.codes.view(torch.uint8)
        gate_round_kernel[(rows,)](gate_up, codes, made.scales, **_by_rows(size, gate_up.device))
    return made


class RoundedNorm:
    """A root-mean-square norm whose results are rounded, with the methods of `nn/norm.py` that a stream calls."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        self._weight = weight
        self._eps = eps

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
        made = _empty(rows, size, total.device)
        if rows:
            codes, form = made.codes.view(torch.uint8), _by_rows(size, total.device)
            norm_round_kernel[(rows,)](
                x, residual, total, self._weight, codes, made.scales, self._eps, PARTS=parts, **form
            )
        return made


def _empty(rows: int, size: int, device: torch.device) -> Rounded:
    scales = torch.empty(rows, 1, dtype=torch.float32, device=device)
    return Rounded(torch.empty(rows, size, dtype=DTYPE, device=device), scales)


def _by_rows(size: int, device: torch.device) -> dict[str, Any]:
    """Return the launch options of a kernel with a program for each row."""
    block = triton.next_power_of_2(size)
    return {"SIZE": size, "BLOCK": block, "num_warps": max(1, min(16, block // 512)), **overlap(device)}


def rounded_product(x: Rounded, floats: Floats, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return x [M, K] @ W^T + bias, multiplied in 8 bits: [M, N]."""
    codes, scales = x.codes, x.scales
    if not codes.is_cuda:
        y = (codes.float() * scales) @ (floats.codes.float() * floats.scales[:, None]).T
        return (y if bias is None else y + bias).to(dtype)
    wanted = torch.bfloat16 if dtype == torch.float32 else dtype
    y = torch._scaled_mm(codes, floats.codes.t(), scales, floats.scales[None, :], out_dtype=wanted, use_fast_accum=True)
    return (y if bias is None else y.add_(bias)).to(dtype)


def row_plan(inputs: int, device: torch.device) -> RowPlan:
    """Return how programs divide the product of one row, as measured on an H200."""
    if device.type != "cuda":
        return RowPlan(128, 128, 1)
    return RowPlan(4, 4096, 4) if inputs % 4096 == 0 and inputs <= 8192 else RowPlan(8, 1024, 4)


def rows_plan(floats: Floats, rows: int, device: torch.device) -> RowsPlan:
    """Return how programs divide the product of several rows, as measured on an H200."""
    if device.type != "cuda":
        return RowsPlan(16 if rows <= 16 else 64, 128, 128, 2 if floats.inputs > 128 else 1, 1, 1)
    block_m = max(16, triton.next_power_of_2(rows))
    block_n, block_k, most = (32, 256, 2) if block_m == 16 else (64, 128, 4)
    wanted = min(most, _PROGRAMS // triton.cdiv(floats.outputs, block_n))
    return RowsPlan(block_m, block_n, block_k, 1 << max(0, wanted.bit_length() - 1), 4, 3 if block_m == 16 else 5)
