"""CUDA C++ kernels: compiled at run time by NVRTC, which torch includes, stored in the cache folder and launched by the
driver.

Make a `Kernel` before steps are recorded: loading one may synchronize the device.

https://docs.nvidia.com/cuda/nvrtc/ and https://docs.nvidia.com/cuda/cuda-driver-api/
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from ctypes import Structure, Union, byref, c_char, c_char_p, c_int, c_size_t, c_uint, c_uint32, c_uint64, c_void_p
from pathlib import Path

import torch
from torch import Tensor

from octavo.hub.cache import kernel_dir

log = logging.getLogger(__name__)

_HOPPER = (9, 0)
"""From here on, launches can begin before the previous one ends, and there are instructions of one chip only."""
_CLUSTER, _OVERLAP = 4, 6
_SHARED_MEMORY, _LARGE_CLUSTERS = 8, 14
_TENSOR_TYPES = {torch.int16: 1, torch.float16: 6, torch.bfloat16: 9}
_SWIZZLE_128 = 3
_PROMOTE_128 = 2
_MAP_ALIGNMENT = 64
_MAP_BYTES = 128


class CudaError(RuntimeError):
    """A call of the compiler or the driver failed."""


class _Value(Union):
    _fields_ = (("padding", c_char * 64), ("flag", c_int), ("size", c_uint * 3))


class _Attribute(Structure):
    _fields_ = (("kind", c_int), ("padding", c_char * 4), ("value", _Value))


class _Launch(Structure):
    _fields_ = (
        ("grid", c_uint * 3),
        ("block", c_uint * 3),
        ("shared", c_uint),
        ("stream", c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", c_uint),
    )


class TensorMap(Structure):
    """How the copy engine reads tiles of a matrix: the driver's CUtensorMap."""

    _fields_ = (("opaque", c_uint64 * 16),)


Argument = c_void_p | c_int | ctypes.c_float | Structure


class Kernel:
    """A kernel on the current GPU."""

    def __init__(
        self, name: str, source: str, defines: Mapping[str, int], threads: int, shared: int = 0, cluster: int = 1
    ) -> None:
        """
        Args:
            defines: macros of the source.
            threads: per block.
            shared: bytes of dynamic shared memory.
            cluster: adjacent blocks that can read each other's shared memory, at most 16.
        """
        self._driver = driver()
        self._cluster = cluster
        module = c_void_p()
        self._function = c_void_p()
        self._check(self._driver.cuModuleLoadData(byref(module), _binary(source, defines)))
        self._check(self._driver.cuModuleGetFunction(byref(self._function), module, name.encode()))
        attributes: list[_Attribute] = []
        if torch.cuda.get_device_capability() >= _HOPPER:
            attributes.append(_Attribute(_OVERLAP))
            attributes[0].value.flag = 1
        if cluster > 1:
            self._check(self._driver.cuFuncSetAttribute(self._function, c_int(_LARGE_CLUSTERS), c_int(1)))
            attributes.append(_Attribute(_CLUSTER))
            attributes[1].value.size = (c_uint * 3)(cluster, 1, 1)
        self._attributes = (_Attribute * len(attributes))(*attributes)
        self._how = _Launch((1, 1, 1), (threads, 1, 1), shared, None, self._attributes, len(attributes))
        if shared:
            self._check(self._driver.cuFuncSetAttribute(self._function, c_int(_SHARED_MEMORY), c_int(shared)))

    def most_clusters(self) -> int:
        """Return how many clusters run at once on an idle GPU."""
        count = c_int()
        self._how.grid[:] = (self._cluster, 1, 1)
        self._check(self._driver.cuOccupancyMaxActiveClusters(byref(count), self._function, byref(self._how)))
        return count.value

    def launch(self, grid: tuple[int, int, int], arguments: Sequence[Argument]) -> None:
        """Launch on the current stream, overlapping the previous launch's end; the kernel must wait for its results."""
        how = self._how
        how.grid[:] = grid
        how.stream = torch.cuda.current_stream().cuda_stream
        pointers = (c_void_p * len(arguments))(*map(ctypes.addressof, arguments))
        self._check(self._driver.cuLaunchKernelEx(byref(how), self._function, pointers, None))

    def _check(self, status: int) -> None:
        _check_driver(self._driver, status)


@functools.cache
def source_of(*names: str) -> str:
    """Return files of the folder `cuda/`, one after the other."""
    folder = Path(__file__).parent / "cuda"
    return "".join((folder / name).read_text(encoding="utf-8") for name in names)


def trusted(purpose: str, trial: Callable[[], Sequence[float]], limit: float) -> bool:
    """Run a trial of kernels; return whether they run and all deviate by less than a limit, else log why they are not
    used.

    Args:
        purpose: what they compute, as the beginning of a line of the log.
        trial: returns relative errors, which may be NaN.
    """
    try:
        wrong = [found for found in trial() if not found < limit]
    except (CudaError, RuntimeError, OSError) as error:
        log.warning("%s by kernels in Triton: %s", purpose, error)
        return False
    if wrong:
        log.warning("%s by kernels in Triton: a trial deviates by %.2g", purpose, wrong[0])
    return not wrong


def address(tensor: Tensor) -> c_void_p:
    return c_void_p(tensor.data_ptr())


def tiles_of(x: Tensor, rows: int, columns: int) -> TensorMap:
    """Return how to copy tiles [rows, columns], 128 bytes wide, of x [M, K], contiguous, of a 16-bit dtype."""
    return boxes_of(x, (rows, columns))


def boxes_of(x: Tensor, box: Sequence[int]) -> TensorMap:
    """Return how to copy boxes of x, of a 16-bit dtype and up to 5 dimensions, to shared memory, where the 128 bytes of
    each row are swizzled. What a box has beyond the ends of x is zeros.

    Args:
        x: the numbers of its last dimension are adjacent; other strides are multiples of 16 bytes, as is its address.
        box: its size in each dimension, in the last one 128 bytes.
    """
    memory = (c_char * (_MAP_BYTES + _MAP_ALIGNMENT))()
    start = -(-ctypes.addressof(memory) // _MAP_ALIGNMENT) * _MAP_ALIGNMENT
    count, lib = x.dim(), driver()
    status = lib.cuTensorMapEncodeTiled(
        c_void_p(start),
        c_int(_TENSOR_TYPES[x.dtype]),
        c_uint32(count),
        address(x),
        (c_uint64 * count)(*reversed(x.shape)),
        (c_uint64 * (count - 1))(*(stride * x.element_size() for stride in reversed(x.stride()[:-1]))),
        (c_uint32 * count)(*reversed(box)),
        (c_uint32 * count)(*[1] * count),
        c_int(0),
        c_int(_SWIZZLE_128),
        c_int(_PROMOTE_128),
        c_int(0),
    )
    _check_driver(lib, status)
    made = TensorMap()
    ctypes.memmove(byref(made), start, _MAP_BYTES)
    return made


@functools.cache
def driver() -> ctypes.CDLL:
    """Return the GPU's driver.

    Raises:
        OSError: it is missing.
    """
    torch.cuda.current_stream()  # makes the context current
    return ctypes.CDLL("libcuda.so.1")


@functools.cache
def _compiler() -> ctypes.CDLL:
    major = (torch.version.cuda or "0").partition(".")[0]
    return ctypes.CDLL(f"libnvrtc.so.{major}")


def compile_ahead(source: str, defines: Mapping[str, int]) -> None:
    """Compile a source in the background, for a `Kernel` that is made later."""
    _begun(source, tuple(sorted(defines.items())))


@functools.cache
def _begun(source: str, defines: tuple[tuple[str, int], ...]) -> Future[bytes]:
    return _pool().submit(_compiled, source, defines)


@functools.cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(min(16, os.cpu_count() or 1), thread_name_prefix="octavo-nvrtc")


def _binary(source: str, defines: Mapping[str, int]) -> bytes:
    """Return the compiled source."""
    return _begun(source, tuple(sorted(defines.items()))).result()


def _compiled(source: str, defines: Sequence[tuple[str, int]]) -> bytes:
    """Compile a source, or read it from the cache folder if it is there."""
    major, minor = capability = torch.cuda.get_device_capability()
    options = [
        f"-arch=sm_{major}{minor}{'a' if capability >= _HOPPER else ''}",
        "-std=c++17",
        "-default-device",
        *(f"-D{name}={value}" for name, value in defines),
    ]
    key = hashlib.sha256("\n".join([torch.version.cuda or "", *options, source]).encode()).hexdigest()
    path = kernel_dir() / "cuda" / f"{key}.cubin"
    try:
        return path.read_bytes()
    except OSError:
        made = _compile(source, options)
        _store(path, made)
        return made


def _store(path: Path, content: bytes) -> None:
    """Write a file at once; a folder that can't be written means that the next start compiles again."""
    part = path.with_suffix(f".{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_bytes(content)
        part.replace(path)
    except OSError:
        part.unlink(missing_ok=True)


def _compile(source: str, options: Sequence[str]) -> bytes:
    lib = _compiler()
    program = c_void_p()
    _check_compiler(lib.nvrtcCreateProgram(byref(program), source.encode(), b"octavo.cu", 0, None, None))
    given = (c_char_p * len(options))(*(option.encode() for option in options))
    if lib.nvrtcCompileProgram(program, c_int(len(options)), given):
        size = c_size_t()
        lib.nvrtcGetProgramLogSize(program, byref(size))
        log = ctypes.create_string_buffer(size.value)
        lib.nvrtcGetProgramLog(program, log)
        raise CudaError(f"NVRTC failed: {log.value.decode(errors='replace')}")
    size = c_size_t()
    _check_compiler(lib.nvrtcGetCUBINSize(program, byref(size)))
    made = ctypes.create_string_buffer(size.value)
    _check_compiler(lib.nvrtcGetCUBIN(program, made))
    lib.nvrtcDestroyProgram(byref(program))
    return made.raw


def _check_compiler(status: int) -> None:
    if status:
        raise CudaError(f"NVRTC failed with status {status}")


def _check_driver(lib: ctypes.CDLL, status: int) -> None:
    if status:
        text = c_char_p()
        lib.cuGetErrorString(c_int(status), byref(text))
        raise CudaError(f"the GPU's driver failed: {(text.value or b'unknown error').decode()}")
