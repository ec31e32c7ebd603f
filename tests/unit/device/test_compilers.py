"""Processes that compile kernels: they do without torch, and leave what another process then finds."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import octavo

pytest.importorskip("triton")

ROOT = Path(octavo.__file__).parent.parent


def run(code: str, **environment: str) -> str:
    """In a process where Triton compiles; what it printed."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | environment
    command = [sys.executable, "-c", code]
    return subprocess.run(command, env=env, cwd=ROOT, check=True, capture_output=True, text=True).stdout


def test_what_holds_kernels_loads_without_torch() -> None:
    files = [path for path in (ROOT / "octavo").rglob("*.py") if "@triton.jit" in path.read_text()]
    assert len(files) > 8
    modules = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in files]
    assert run(f"import sys, {', '.join(modules)}; print('torch' in sys.modules)") == "False\n"


START = """
import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel
from triton.runtime import driver
import octavo.device.compilers as compilers
from octavo.device.ahead import Ahead
from octavo.device.compiler import NoDriver
from octavo.nn.ops import triton_activation

driver.set_active(NoDriver(GPUTarget("cuda", 90, 32)))
knobs.compilation.listener = lambda **told: print("found" if told["cache_hit"] else "compiled")
CompiledKernel._init_handles = lambda self: None  # there is no GPU to load it
kernel, x = triton_activation._silu_mul_kernel, torch.empty(2, 256, dtype=torch.bfloat16)

def start():
    kernel.device_caches.clear()
    ahead = Ahead(("cuda", 90, 32))
    with ahead.collecting():
        triton_activation.silu_mul(x)
    ahead.wait()
"""


@pytest.mark.parametrize(
    "cached",
    [
        pytest.param([], id="an empty cache"),
        pytest.param(["something"], id="others' kernels there", marks=pytest.mark.slow),
    ],
)
def test_another_process_compiles_what_this_one_looks_for(tmp_path: Path, cached: list[str]) -> None:
    for name in cached:
        (tmp_path / name).mkdir()
    again = "compilers.Compilers._process = None"  # what is cached asks nobody
    alone = "kernel.run(x, x, SIZE=64, BLOCK=64, OVERLAPS=False, grid=(1,), warmup=True)"
    printed = run("\n".join([START, "start()", again, "start()", alone]), TRITON_CACHE_DIR=str(tmp_path))
    assert printed.split() == ["found", "found", "compiled"]


def test_what_cannot_be_compiled_elsewhere_is_compiled_here(tmp_path: Path) -> None:
    printed = run(START + "compilers._SERVE = 'raise SystemExit'; start()", TRITON_CACHE_DIR=str(tmp_path))
    assert printed.split() == ["compiled"]
