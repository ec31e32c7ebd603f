"""cuBLASLt, which torch includes, through ctypes: enumerate its algorithms for a product and run a chosen one.

torch uses the heuristic's first choice, which for some numbers of rows is far from the fastest.
https://docs.nvidia.com/cuda/cublas/#using-the-cublaslt-api
"""

from __future__ import annotations

import ctypes
import functools
from ctypes import (
    POINTER,
    Structure,
    byref,
    c_char_p,
    c_float,
    c_int,
    c_int32,
    c_int64,
    c_size_t,
    c_ubyte,
    c_uint32,
    c_uint64,
    c_void_p,
)

import torch
from torch import Tensor

_TYPES = {torch.float32: 0, torch.float16: 2, torch.bfloat16: 14}
_COMPUTE_32F = 68
_REAL_32F = 0
_TRANSPOSE_A = 3
_TRANSPOSED = 1
_MAX_WORKSPACE = 1
_REDUCTIONS = 3
_BATCH_COUNT = 5
_BATCH_OFFSET = 6
_ALIGNMENT = 256
_ALGORITHM_BYTES = 64
WORKSPACE_BYTES = 32 << 20


class _Found(Structure):
    _fields_ = (
        ("algorithm", c_ubyte * _ALGORITHM_BYTES),
        ("workspace", c_size_t),
        ("state", c_int),
        ("waves", c_float),
        ("reserved", c_int * 4),
    )


class CublasError(RuntimeError):
    """A call of the library failed."""


class Library:
    """The library's functions, and a handle and a workspace that all products share.

    Attributes:
        version: of the library; algorithms are valid for one version only.

    Raises:
        OSError: the library is missing.
    """

    def __init__(self) -> None:
        major = (torch.version.cuda or "0").partition(".")[0]
        self._lib = ctypes.CDLL(f"libcublasLt.so.{major}")
        self._lib.cublasLtMatmul.argtypes = (
            [c_void_p] * 2
            + [POINTER(c_float)]
            + [c_void_p] * 4
            + [POINTER(c_float)]
            + [c_void_p] * 4
            + [c_char_p, c_void_p, c_size_t, c_void_p]
        )
        self.device = torch.cuda.current_device()
        self.handle = c_void_p()
        self.check(self._lib.cublasLtCreate(byref(self.handle)))
        self.workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")
        self.run = self._lib.cublasLtMatmul
        self.fits = self._lib.cublasLtMatmulAlgoCheck
        self._lib.cublasLtGetVersion.restype = c_size_t
        self.version = int(self._lib.cublasLtGetVersion())

    def check(self, status: int) -> None:
        if status:
            raise CublasError(f"cuBLASLt failed with status {status}")

    def layout(
        self, dtype: torch.dtype, rows: int, columns: int, stride: int | None = None, parts: tuple[int, int] = (1, 0)
    ) -> c_void_p:
        """Return the layout of a column-major matrix with columns `stride` elements apart; `parts` (count, offset): of
        several matrices."""
        made = c_void_p()
        kind, columns_apart = c_int(_TYPES[dtype]), c_int64(rows if stride is None else stride)
        self.check(
            self._lib.cublasLtMatrixLayoutCreate(byref(made), kind, c_uint64(rows), c_uint64(columns), columns_apart)
        )
        if parts[0] > 1:
            mark = self._lib.cublasLtMatrixLayoutSetAttribute
            self.check(mark(made, c_int(_BATCH_COUNT), byref(c_int32(parts[0])), c_size_t(4)))
            self.check(mark(made, c_int(_BATCH_OFFSET), byref(c_int64(parts[1])), c_size_t(8)))
        return made

    def operation(self) -> c_void_p:
        """Return the descriptor of a product with a transposed left side."""
        made = c_void_p()
        self.check(self._lib.cublasLtMatmulDescCreate(byref(made), c_int(_COMPUTE_32F), c_int(_REAL_32F)))
        flag = c_int32(_TRANSPOSED)
        self.check(self._lib.cublasLtMatmulDescSetAttribute(made, c_int(_TRANSPOSE_A), byref(flag), c_size_t(4)))
        return made

    def candidates(self, operation: c_void_p, layouts: list[c_void_p], count: int, *, splits: bool) -> list[bytes]:
        """Return at most `count` algorithms; with `splits`, also those that split the inputs and sum in a second
        launch."""
        preference = c_void_p()
        self.check(self._lib.cublasLtMatmulPreferenceCreate(byref(preference)))
        wanted = self._lib.cublasLtMatmulPreferenceSetAttribute
        most, none = c_uint64(WORKSPACE_BYTES), c_uint32(0)
        self.check(wanted(preference, c_int(_MAX_WORKSPACE), byref(most), c_size_t(8)))
        if not splits:
            self.check(wanted(preference, c_int(_REDUCTIONS), byref(none), c_size_t(4)))
        found = (_Found * count)()
        number = c_int(0)
        self.check(
            self._lib.cublasLtMatmulAlgoGetHeuristic(
                self.handle, operation, *layouts, preference, c_int(count), found, byref(number)
            )
        )
        self._lib.cublasLtMatmulPreferenceDestroy(preference)
        return [bytes(found[i].algorithm) for i in range(number.value) if found[i].state == 0]


@functools.cache
def library() -> Library | None:
    """Return the library, or None if it can't be used."""
    try:
        return Library()
    except (OSError, AttributeError, CublasError):
        return None


class Product:
    """x [M, K] @ weight [N, K]^T of one shape and dtype, by any algorithm. Contiguous tensors only.

    With several `parts`, the inputs are divided equally and each part's product is stored, [parts, M, N], without
    summing.

    The workspace is shared, so all products of a process must run on one stream.
    """

    def __init__(
        self, lib: Library, dtype: torch.dtype, out: torch.dtype, rows: int, outputs: int, inputs: int, parts: int = 1
    ) -> None:
        self._lib = lib
        self._parts = parts
        self._operation = lib.operation()
        part = inputs // parts
        self._a = lib.layout(dtype, part, outputs, inputs, (parts, part))
        self._b = lib.layout(dtype, part, rows, inputs, (parts, part))
        self._c = lib.layout(out, outputs, rows, outputs, (parts, rows * outputs))
        self._one, self._zero = c_float(1.0), c_float(0.0)

    def algorithms(self, count: int) -> list[bytes]:
        """Return at most `count` algorithms in the order of the library's heuristic. They may be stored."""
        layouts = [self._a, self._b, self._c, self._c]
        return self._lib.candidates(self._operation, layouts, count, splits=self._parts == 1)

    def takes(self, algorithm: bytes) -> bool:
        """Return whether an algorithm for another number of rows also supports this product within the workspace."""
        found = _Found()
        layouts = (self._a, self._b, self._c, self._c)
        status: int = self._lib.fits(self._lib.handle, self._operation, *layouts, algorithm, byref(found))
        return status == 0 and found.workspace <= WORKSPACE_BYTES

    def into(self, out: Tensor, x: Tensor, weight: Tensor, algorithm: bytes, *, add: bool = False) -> None:
        """Write x @ weight^T to `out` [M, N] or [parts, M, N], or with `add` add it; rounded once."""
        lib = self._lib
        status = lib.run(
            lib.handle,
            self._operation,
            byref(self._one),
            weight.data_ptr(),
            self._a,
            x.data_ptr(),
            self._b,
            byref(self._one if add else self._zero),
            out.data_ptr(),
            self._c,
            out.data_ptr(),
            self._c,
            algorithm,
            lib.workspace.data_ptr(),
            WORKSPACE_BYTES,
            _stream(lib.device),
        )
        lib.check(status)


def _stream(device: int) -> int:
    """Return the current stream's address, by torch's fast path if it exists, since every product needs it."""
    short = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    return int(short(device) if short is not None else torch.cuda.current_stream(device).cuda_stream)


def aligned(*tensors: Tensor) -> bool:
    """Return whether these tensors are aligned as the algorithms require."""
    return all(tensor.data_ptr() % _ALIGNMENT == 0 for tensor in tensors)


def algorithm_of(text: str) -> bytes | None:
    """Parse the hexadecimal text of an algorithm; return None if it is invalid."""
    try:
        found = bytes.fromhex(text)
    except (ValueError, TypeError):
        return None
    return found if len(found) == _ALGORITHM_BYTES else None
