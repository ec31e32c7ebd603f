"""Every variant of the kernels of packed experts and of codes compiles for a Hopper GPU, and keeps its numbers in
registers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import octavo

pytest.importorskip("triton")

from hopper import CODES, FORMS

ROOT = Path(octavo.__file__).parent.parent
SHARED = 232448
"""Bytes of shared memory that a program may have (compute capability 9.0, CUDA C++ programming guide)."""
SPILLED = {"MXFP4": 68, "NVFP4": 76}
"""Bytes that a variant spills, where it spills any."""


@pytest.mark.slow
@pytest.mark.parametrize("form", [*FORMS, *CODES])
def test_kernels_fit_a_hopper_gpu(form: str) -> None:
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(ROOT / "tests" / "hopper.py"), form]
    lines = subprocess.run(command, env=env, check=True, capture_output=True, text=True).stdout.splitlines()
    found = [json.loads(line) for line in lines]
    of_experts = {"packed_grouped_kernel", "packed_gate_up_row_kernel", "packed_down_row_kernel"}
    of_words = {"words_rows_kernel", "widen_kernel"}
    assert (of_words if form in CODES else of_experts) <= {one["kernel"] for one in found}
    for one in found:
        assert one["spilled"] <= SPILLED.get(form, 0), one
        assert one["shared"] <= SHARED, one
