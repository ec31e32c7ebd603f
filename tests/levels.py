"""The instruction set levels of the CPU kernels, for tests of each that this machine has."""

from __future__ import annotations

import pytest

from octavo.native.build import NativeBuildError, load_library
from octavo.native.isa import LEVELS, usable

ISAS = [isa.name for isa in LEVELS]


def needs_isa(name: str) -> str:
    """The name; the test is skipped, with the reason, where the processor or the compiler lacks it."""
    if name not in [isa.name for isa in usable()]:
        pytest.skip(f"this processor has no {name}")
    try:
        load_library(name)
    except NativeBuildError as error:
        pytest.skip(f"no kernels on this machine: {error}")
    return name
