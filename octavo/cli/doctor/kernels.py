"""Octavo's C++ kernels for CPUs: the compiler, and whether it compiles what this processor can run."""

from __future__ import annotations

import time
from dataclasses import dataclass

from octavo.cli.doctor.check import Area, Check, Finding, Wish, broken, fine, warning
from octavo.device.early import is_cpu
from octavo.native.build import COMPILERS, NativeBuildError, compilers, level_of, load_library
from octavo.native.isa import usable

_INSTALL = "apt-get install g++, or dnf install gcc-c++"


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """The kernels on this machine.

    Attributes:
        compilers: paths of C++ compilers.
        isa: the instruction set that is set, or "auto".
        best: the best that this processor can run.
        tried: they were compiled, or loaded if they were compiled before.
        problem: why that failed; "" if it did not.
        level: the instruction set of those that work.
        seconds: that it took.
    """

    compilers: tuple[str, ...]
    isa: str = "auto"
    best: str = ""
    tried: bool = False
    problem: str = ""
    level: str = ""
    seconds: float = 0.0


def read(wish: Wish) -> Kernels | None:
    if not is_cpu(wish.engine.device.device):
        return None
    isa = wish.engine.device.cpu_isa
    found, best = tuple(compilers()), usable()[0].name
    if wish.quick:
        return Kernels(compilers=found, isa=isa, best=best)
    began = time.perf_counter()
    try:
        load_library(isa)
    except NativeBuildError as error:
        return Kernels(compilers=found, isa=isa, best=best, tried=True, problem=str(error))
    seconds = time.perf_counter() - began
    return Kernels(compilers=found, isa=isa, best=best, tried=True, level=level_of(isa), seconds=seconds)


def judge_compiler(found: Kernels) -> Finding:
    if found.compilers:
        return fine(", ".join(found.compilers))
    return warning(
        f"there is no C++ compiler ({', '.join(COMPILERS)}, or $CXX), so models run layer by layer in torch, which is "
        "slower",
        _INSTALL,
    )


def judge_kernels(found: Kernels) -> Finding | None:
    if not found.tried or not found.compilers:
        return None
    if found.problem and found.isa != "auto":
        return broken(f"--cpu-isa {found.isa}: {found.problem}", "leave --cpu-isa out, or choose another")
    if found.problem:
        return warning(
            f"the kernels can't be compiled, so models run layer by layer in torch, which is slower: {found.problem}",
            f"install another compiler ({_INSTALL}), or set CXX to one",
        )
    if found.isa == "auto" and found.level != found.best:
        return warning(
            f"this processor has {found.best}, but {found.compilers[0]} makes working kernels only for {found.level}",
            f"install a newer compiler ({_INSTALL}), or set CXX to one; for AMX, the container must allow it (seccomp)",
        )
    return fine(f"compiled for {found.level}, or loaded, in {found.seconds:.1f} s")


AREA = Area("CPU kernels", read, (Check("compiler", judge_compiler), Check("kernels", judge_kernels)))
