"""Attention on CPU in Octavo's own C++ kernel, compiled on this machine when it is first wanted."""

from __future__ import annotations

import ctypes
import functools
from ctypes import c_float, c_int32, c_int64, c_void_p
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from octavo.nn.attention.base import AttentionSpec
from octavo.nn.attention.native_build import load_library
from octavo.nn.step import StepInput

DTYPES = (torch.float32, torch.bfloat16)
HEAD_DIM_MULTIPLE = 16


class _AttendArgs(ctypes.Structure):
    """`AttendArgs` of attention.cpp."""

    _fields_ = (
        ("q", c_void_p),
        ("out", c_void_p),
        ("cache", c_void_p),
        ("query_start", c_void_p),
        ("seq_lens", c_void_p),
        ("block_tables", c_void_p),
        ("q_token_stride", c_int64),
        ("q_head_stride", c_int64),
        ("table_stride", c_int64),
        ("rows", c_int32),
        ("heads", c_int32),
        ("kv_heads", c_int32),
        ("head_dim", c_int32),
        ("block_size", c_int32),
        ("window", c_int32),
        ("bfloat", c_int32),
        ("threads", c_int32),
        ("scale", c_float),
        ("soft_cap", c_float),
    )


class _WriteArgs(ctypes.Structure):
    """`WriteArgs` of attention.cpp."""

    _fields_ = (
        ("k", c_void_p),
        ("v", c_void_p),
        ("cache", c_void_p),
        ("slots", c_void_p),
        ("k_token_stride", c_int64),
        ("k_head_stride", c_int64),
        ("v_token_stride", c_int64),
        ("v_head_stride", c_int64),
        ("tokens", c_int32),
        ("kv_heads", c_int32),
        ("head_dim", c_int32),
        ("block_size", c_int32),
        ("bfloat", c_int32),
        ("threads", c_int32),
    )


class NativeAttention:
    """Copies nothing; a result depends neither on the rest of the batch nor on how a prompt was cut, bit for bit."""

    name = "native"

    def __init__(self) -> None:
        """
        Raises:
            NativeBuildError: the kernel can't be had on this machine.
        """
        self._library = load_library()
        _share_threads()

    def cache_shape(self, spec: AttentionSpec, num_blocks: int, block_size: int) -> tuple[int, ...]:
        """[block, head, key or value, ...]; a block's keys lie [channel, offset] and its values [offset, channel]."""
        return (num_blocks, spec.num_kv_heads, 2, block_size, spec.head_dim)

    def prepare(self, step: StepInput, block_size: int) -> Any:
        """The arguments that every layer has in common."""
        _require_layout(step)
        return _AttendArgs(
            query_start=step.query_start.data_ptr(),
            seq_lens=step.seq_lens.data_ptr(),
            block_tables=step.block_tables.data_ptr(),
            table_stride=step.block_tables.stride(0),
            rows=step.num_rows,
            block_size=block_size,
            threads=torch.get_num_threads(),
        )

    def write(self, k: Tensor, v: Tensor, cache: Tensor, step: StepInput) -> None:
        k, v = _adjacent(k), _adjacent(v)
        args = _WriteArgs(
            k=k.data_ptr(),
            v=v.data_ptr(),
            cache=cache.data_ptr(),
            slots=step.slot_mapping.data_ptr(),
            k_token_stride=k.stride(0),
            k_head_stride=k.stride(1),
            v_token_stride=v.stride(0),
            v_head_stride=v.stride(1),
            tokens=k.shape[0],
            kv_heads=cache.shape[1],
            head_dim=cache.shape[4],
            block_size=cache.shape[3],
            bfloat=cache.dtype == torch.bfloat16,
            threads=torch.get_num_threads(),
        )
        self._library.octavo_write(ctypes.byref(args))

    def attend(self, q: Tensor, cache: Tensor, step: StepInput, spec: AttentionSpec) -> Tensor:
        q = _adjacent(q)
        out = torch.empty(q.shape, dtype=q.dtype)
        args: _AttendArgs = step.attn
        args.q, args.out, args.cache = q.data_ptr(), out.data_ptr(), cache.data_ptr()
        args.q_token_stride, args.q_head_stride, _ = q.stride()
        args.heads, args.kv_heads, args.head_dim = spec.num_heads, spec.num_kv_heads, spec.head_dim
        args.window, args.soft_cap, args.scale = spec.window or 0, spec.soft_cap or 0.0, spec.scale
        args.bfloat = q.dtype == torch.bfloat16
        self._library.octavo_attend(ctypes.byref(args))
        return out


def reason_against(device: torch.device, dtype: torch.dtype, spec: AttentionSpec) -> str | None:
    """Why the kernel can't serve this, apart from there being no compiler; None if it can."""
    if device.type != "cpu":
        return f"runs on cpu, not on {device.type}"
    if dtype not in DTYPES:
        return f"computes in {', '.join(map(str, DTYPES))}, not in {dtype}"
    if spec.head_dim % HEAD_DIM_MULTIPLE:
        return f"needs a head dimension that is a multiple of {HEAD_DIM_MULTIPLE}, not {spec.head_dim}"
    return None


@functools.cache
def _share_threads() -> None:
    """Lets the kernel compute on the threads that torch's own operators use.

    A second OpenMP runtime in the process would have threads of its own, which spin against torch's for the same
    cores. GOMP_parallel is what compilers call for a parallel region; GNU's, LLVM's and Intel's runtimes all have it.
    """
    library = load_library()
    library.octavo_use_threads.argtypes = [c_void_p]
    for candidate in ("libtorch_cpu.so", "libtorch_cpu.dylib"):
        path = Path(torch.__file__).parent / "lib" / candidate
        if path.exists():
            entry = getattr(ctypes.CDLL(str(path)), "GOMP_parallel", None)
            if entry is not None:
                library.octavo_use_threads(ctypes.cast(entry, c_void_p))
                return


def _adjacent(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _require_layout(step: StepInput) -> None:
    for name, tensor, dtype in (
        ("query_start", step.query_start, torch.int32),
        ("seq_lens", step.seq_lens, torch.int32),
        ("block_tables", step.block_tables, torch.int32),
        ("slot_mapping", step.slot_mapping, torch.int64),
    ):
        if tensor.dtype != dtype or tensor.stride(-1) != 1 or tensor.device.type != "cpu":
            raise TypeError(f"StepInput.{name} must be {dtype} on cpu with adjacent entries, not {tensor.dtype}.")
