"""Compile a CUDA kernel for the CPU, to test its arithmetic of places without a GPU; see cuda_on_cpu.h."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

HEADER = Path(__file__).with_name("cuda_on_cpu.h")
_FUNCTION = re.compile(
    r"^(?:template <[^>\n]*>\n)?__device__ __forceinline__ (?:[^\n]*\}\n|.*?^\}\n)", re.MULTILINE | re.DOTALL
)


def without_instructions(source: str) -> str:
    """Remove functions of PTX, which the header has."""
    return _FUNCTION.sub(lambda found: "" if _of_gpu(found[0]) else found[0], source)


def _of_gpu(function: str) -> bool:
    return "asm" in function or "__cvta" in function


def compiled(source: str, kernel: str, macros: Mapping[str, int], folder: Path) -> ctypes.CDLL:
    """Compile a kernel that takes pointers, structures, floats and integers. The function `run` launches it.

    It gets addresses of structures among the pointers."""
    body = without_instructions(source).replace(
        "extern __shared__ __align__(128) unsigned char memory[];", "unsigned char* const memory = emulated_shared;"
    )
    given = re.search(rf"^{kernel}\((.*?)\) \{{", body, re.M | re.S)
    assert given is not None
    kinds = [part.rsplit(maxsplit=1)[0].replace("__restrict__", "").strip() for part in given[1].split(",")]
    taken = {"float": 0, "int": 0, "*": 0}
    arguments = []
    for kind in kinds:
        of = kind if kind in taken else "*"
        value = f"{'pfi'['*fi'.index(of[0])]}[{taken[of]}]"
        arguments.append(f"({kind}){value}" if kind in taken or "*" in kind else f"*({kind}*){value}")
        taken[of] += 1
    body = re.sub(r'extern "C" __global__ void', "void", body)
    body += f"""
extern "C" void run(void** p, const float* f, const int* i, const unsigned* grid, size_t shared, bool late) {{
  emulated::launch({{grid[0], grid[1], grid[2]}}, shared, late, [=] {{ {kernel}({", ".join(arguments)}); }});
}}
"""
    text = "".join(f"#define {name} {value}\n" for name, value in macros.items()) + HEADER.read_text() + body
    path = folder / f"{kernel}-{hashlib.sha256(text.encode()).hexdigest()[:16]}.cpp"
    path.write_text(text)
    library = path.with_suffix(".so")
    options = ["-std=c++17", "-O1", "-w", "-fpermissive", "-shared", "-fPIC", "-Wno-unknown-pragmas"]
    options += ["-U_FORTIFY_SOURCE"]  # which takes a jump to another stack for an error
    subprocess.run(["g++", *options, "-o", library, path], check=True)
    return ctypes.CDLL(str(library))


class EmulatedKernel:
    """In place of `nvrtc.Kernel`, for a source of the functions in cuda_on_cpu.h."""

    folder: Path
    """Where kernels are compiled; a test sets it."""
    late: Sequence[bool] = (False,)
    """When copies into shared memory happen, see `launch`: the kernel runs once for each, over the same results."""

    def __init__(
        self, name: str, source: str, defines: Mapping[str, int], threads: int, shared: int = 0, cluster: int = 1
    ) -> None:
        assert threads == 32 * defines["WARPS"]
        self._shared = shared
        self._library = _kernel(source, name, tuple(({**_UNUSED, **defines}).items()), self.folder)

    def launch(self, grid: tuple[int, int, int], arguments: Sequence[Any]) -> None:
        pointers = [
            ctypes.addressof(one) if isinstance(one, ctypes.Structure) else one.value or 0
            for one in arguments
            if isinstance(one, ctypes.c_void_p | ctypes.Structure)
        ]
        floats = [one.value for one in arguments if isinstance(one, ctypes.c_float)]
        integers = [one.value for one in arguments if isinstance(one, ctypes.c_int)]
        for late in self.late:
            launch(self._library, pointers, floats, integers, grid, self._shared, late=late)


_UNUSED = {"FORM": 3, "DEPTH": 1, "ADDED": 0, "OUT_FLOAT": 0}
"""Macros that the header needs, and not all kernels have."""


@functools.cache
def _kernel(source: str, name: str, macros: tuple[tuple[str, int], ...], folder: Path) -> ctypes.CDLL:
    return compiled(source, name, dict(macros), folder)


def launch(
    library: ctypes.CDLL,
    tensors: Sequence[Tensor | int],
    floats: Sequence[float],
    integers: Sequence[int],
    grid: tuple[int, int, int],
    shared: int,
    *,
    late: bool,
) -> None:
    """Launch a kernel of `compiled`.

    Args:
        tensors: or addresses.
        late: copies into shared memory happen as late as they may, else at once.
    """
    library.run(
        (ctypes.c_void_p * len(tensors))(*(one if isinstance(one, int) else one.data_ptr() for one in tensors)),
        (ctypes.c_float * len(floats))(*floats),
        (ctypes.c_int * len(integers))(*integers),
        (ctypes.c_uint * 3)(*grid),
        ctypes.c_size_t(shared),
        ctypes.c_bool(late),
    )
