"""The instruction set levels of the CPU kernels, for tests of each that this machine has.

By default these are the best one, AVX2 and the portable one: a level takes half a minute to compile.
"""

from __future__ import annotations

import shutil
import subprocess

import pytest

from octavo.native.build import COMPILERS, NativeBuildError, load_library
from octavo.native.isa import LEVELS, Isa, usable

_DEFAULT = {usable()[0].name, "avx2", "portable"}


def is_slow(isa: Isa) -> bool:
    """Whether this machine has the level, but only `make test-all` tests it."""
    return isa in usable() and isa.name not in _DEFAULT


ISAS = [pytest.param(isa.name, marks=pytest.mark.slow) if is_slow(isa) else isa.name for isa in LEVELS]


def needs_isa(name: str) -> str:
    """The name; the test is skipped, with the reason, where the processor or the compiler lacks it.

    Kernels that do not compile where the compiler knows the instructions fail the test.
    """
    level = next((level for level in usable() if level.name == name), None)
    if level is None:
        pytest.skip(f"this processor has no {name}")
    try:
        load_library(name)
    except NativeBuildError as error:
        if compiles(level.compiler_flags):
            raise
        pytest.skip(f"no compiler for {name} on this machine: {error}")
    return name


def compiles(flags: tuple[str, ...]) -> bool:
    """Whether a compiler takes these flags."""
    commands = [[path, *flags, "-fsyntax-only", "-x", "c++", "-"] for path in map(shutil.which, COMPILERS) if path]
    return any(subprocess.run(command, input=b"", capture_output=True).returncode == 0 for command in commands)
