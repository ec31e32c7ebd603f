"""Instruction sets that the kernels can be compiled for, and detection of those that this processor has."""

from __future__ import annotations

import ctypes
import functools
import platform
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Isa:
    """An instruction set for the kernels.

    Attributes:
        cpu_flags: required flags in /proc/cpuinfo.
        compiler_flags: options of GCC and Clang that enable it.
    """

    name: str
    cpu_flags: frozenset[str]
    compiler_flags: tuple[str, ...]


_V4 = frozenset({"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512cd", "fma", "f16c", "bmi2"})
_V4_BF16 = _V4 | {"avx512_bf16", "avx512_vnni"}
# GCC's tuning for some processors takes multiplications out of chains of fused multiply-adds, loop by loop: a row's
# bits would depend on how many are computed with it. The parameter forbids it.
_TUNED = ("-mtune=native", "--param=avoid-fma-max-bits=0")
_V4_BF16_FLAGS = ("-march=x86-64-v4", "-mavx512bf16", "-mavx512vnni", *_TUNED)
_AMX = frozenset({"amx_tile", "amx_bf16", "amx_int8"})

LEVELS: tuple[Isa, ...] = (
    Isa("amx_bf16", _V4_BF16 | _AMX, (*_V4_BF16_FLAGS, "-mamx-tile", "-mamx-bf16", "-mamx-int8")),
    Isa("avx512_bf16", _V4_BF16, _V4_BF16_FLAGS),
    Isa("avx512_vnni", _V4 | {"avx512_vnni"}, ("-march=x86-64-v4", "-mavx512vnni", *_TUNED)),
    Isa("avx512", _V4, ("-march=x86-64-v4", *_TUNED)),
    Isa("avx2", frozenset({"avx2", "fma", "f16c", "bmi2"}), ("-march=x86-64-v3", *_TUNED)),
    Isa("portable", frozenset(), ()),
)
NAMES = tuple(level.name for level in LEVELS)


def activation_advice(level: str, activations: str) -> str:
    """Return advice on a faster --activation-dtype for integer weights than the current one; usually "".

    Args:
        level: name of the instruction set in use.
        activations: "int16", "int8" or "bfloat16".
    """
    if "amx" in level and activations != "bfloat16":
        return "--activation-dtype bfloat16 is faster here for prompts and batches, slower for one request"
    if "bf16" not in level and activations == "bfloat16":
        return "--activation-dtype int16 is faster here, and more exact"
    return ""


def usable() -> list[Isa]:
    """Return the instruction sets that this processor can run, fastest first; "portable" is always the last.

    If AMX is among them, this process has requested it from the system, so its threads may use it from now on.
    """
    if platform.machine() not in ("x86_64", "AMD64"):
        return [LEVELS[-1]]
    flags = _cpu_flags()
    if flags >= _AMX and not _tiles_granted():
        flags -= _AMX
    return [level for level in LEVELS if level.cpu_flags <= flags]


@functools.cache
def _tiles_granted() -> bool:
    """Request AMX's tiles, whose 8 KiB Linux saves only for processes that request them; return whether it was granted.

    Older kernels, sandboxes and seccomp filters refuse. See https://docs.kernel.org/arch/x86/xstate.html.
    """
    arch_prctl, request_permission, tile_data = 158, 0x1023, 18
    try:
        asked: int = ctypes.CDLL(None).syscall(*map(ctypes.c_long, (arch_prctl, request_permission, tile_data)))
    except (OSError, AttributeError):
        return False
    return asked == 0


def _cpu_flags() -> frozenset[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line for line in lines if line.startswith("flags")), "").split())
