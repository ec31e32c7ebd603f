"""Which instruction sets the kernels can be compiled for, and which of them this processor has."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Isa:
    """One way to compile the kernels.

    Attributes:
        cpu_flags: what /proc/cpuinfo must list.
        compiler_flags: what makes GCC and Clang use it.
    """

    name: str
    cpu_flags: frozenset[str]
    compiler_flags: tuple[str, ...]


_V4 = frozenset({"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512cd", "fma", "f16c", "bmi2"})

LEVELS: tuple[Isa, ...] = (
    Isa(
        "avx512_bf16",
        _V4 | {"avx512_bf16", "avx512_vnni"},
        ("-march=x86-64-v4", "-mavx512bf16", "-mavx512vnni", "-mtune=native"),
    ),
    Isa("avx512_vnni", _V4 | {"avx512_vnni"}, ("-march=x86-64-v4", "-mavx512vnni", "-mtune=native")),
    Isa("avx512", _V4, ("-march=x86-64-v4", "-mtune=native")),
    Isa("avx2", frozenset({"avx2", "fma", "f16c", "bmi2"}), ("-march=x86-64-v3", "-mtune=native")),
    Isa("portable", frozenset(), ()),
)
NAMES = tuple(level.name for level in LEVELS)


def usable() -> list[Isa]:
    """The levels that this processor can run, fastest first; "portable" is always the last."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return [LEVELS[-1]]
    flags = _cpu_flags()
    return [level for level in LEVELS if level.cpu_flags <= flags]


def _cpu_flags() -> frozenset[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line for line in lines if line.startswith("flags")), "").split())
