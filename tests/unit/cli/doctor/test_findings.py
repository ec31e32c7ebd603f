"""Every check of `octavo doctor` can fail, and says what to do."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from octavo.cli.doctor import (
    areas,
    folders,
    gpus,
    hub,
    kernels,
    machine,
    model,
    packages,
    server,
    settings,
    torch_checks,
)
from octavo.cli.doctor.check import Area, Finding, Result
from octavo.cli.doctor.folders import Folder, Folders
from octavo.cli.doctor.gpus import Gpus
from octavo.cli.doctor.hub import Hub
from octavo.cli.doctor.kernels import Kernels
from octavo.cli.doctor.machine import Machine
from octavo.cli.doctor.model import Model
from octavo.cli.doctor.packages import Packages
from octavo.cli.doctor.probe import Probe
from octavo.cli.doctor.server import Door
from octavo.cli.doctor.settings import Settings
from octavo.cli.doctor.torch_checks import Tried
from octavo.core.nvml import GpuSetup, GpuState

GIB = 1 << 30
FINE, WARNING, BROKEN = Result.FINE, Result.WARNING, Result.BROKEN
AREAS: Mapping[str, Area[Any]] = {area.name: area for area in areas()}


def python(**changes: Any) -> Packages:
    return Packages(**{"python": "3.12.1", "needs_python": ">=3.11", "bits": 64, "count": 20, **changes})


def host(**changes: Any) -> Machine:
    return Machine(**{"memory": 64 * GIB, "memory_left": 60 * GIB, "cpus": 8, "allowed": 8, "cores": 4, **changes})


def folder(**changes: Any) -> Folder:
    usual = {"path": Path("/c/octavo"), "existing": Path("/c"), "writable": True, "executes": True, "free": 9 * GIB}
    return Folder(**{**usual, **changes})


def places(**changes: Any) -> Folders:
    usual = {"kernels": folder(), "triton": folder(), "models": (folder(),), "jobs": folder(), "temporary": folder()}
    return Folders(**{**usual, **changes})


def gpu(index: int = 0, **changes: Any) -> GpuState:
    usual = {"name": "NVIDIA H200", "uuid": f"GPU-{index}", "memory_total": 140 * GIB, "memory_used": 0}
    return GpuState(index=index, **{**usual, **changes})


def driven(*states: GpuState, setups: Mapping[int, GpuSetup] | None = None, **changes: Any) -> Gpus:
    states = states or (gpu(),)
    known = {one.index: GpuSetup() for one in states} | dict(setups or {})
    usual = {"on_bus": len(states), "has_device": True, "driver": "580.65.06", "cuda": (13, 0)}
    return Gpus(**{**usual, "states": states, "all_states": states, "setups": known, **changes})


def torch(**changes: Any) -> Tried:
    usual = {"torch": "2.11.0", "cuda": "13.0", "available": True, "triton": "3.6.0", "built_for": ["sm_90"]}
    probe = Probe(**{**usual, "gpus": [("NVIDIA H200", (9, 0))], **changes.pop("probe", {})})
    return Tried(**{"probe": probe, "has_gpu": True, "driver_cuda": (13, 0), **changes})


def cpu_kernels(**changes: Any) -> Kernels:
    usual = {"compilers": ("/usr/bin/g++",), "best": "avx512", "level": "avx512", "tried": True}
    return Kernels(**{**usual, **changes})


def found(**changes: Any) -> Model:
    usual = {"found": "/m", "weight_bytes": 2 * GIB, "text_problem": "", "config_problem": "", "memory": 60 * GIB}
    return Model(**{**usual, "architecture": "LlamaForCausalLM", **changes})


TWO = (gpu(0), gpu(1))
USED = gpu(memory_used=11 * GIB)
USUAL_POWER = GpuSetup(default_power_limit_w=700.0)
EXCLUSIVE = GpuSetup(compute_mode="exclusive process", processes=((5, 1),))
CASES: list[tuple[str, str, Any, Result, str, str]] = [
    ("packages", "Python", python(), FINE, "3.12.1", ""),
    ("packages", "Python", python(python="3.10.2"), BROKEN, "needs >=3.11", "venv"),
    ("packages", "Python", python(bits=32), BROKEN, "32-bit", "64-bit"),
    ("packages", "versions", python(), FINE, "all 20", ""),
    ("packages", "versions", python(wrong=(("torch>=2.11", "2.4"),)), BROKEN, "2.4 is installed", "'torch>=2.11'"),
    ("packages", "versions", python(wrong=(("uvloop>=0.21", ""),)), BROKEN, "none is installed", "'uvloop>=0.21'"),
    ("packages", "Ray", python(needs_ray=True, has_ray=True), FINE, "ray", ""),
    ("packages", "Ray", python(needs_ray=True), BROKEN, "--distributed-executor-backend ray", "octavo[ray]"),
    ("packages", "traces", python(tracing_problem="no OTLP"), BROKEN, "no OTLP", "--otlp-traces-endpoint"),
    ("settings", "flags", Settings(()), FINE, "together", ""),
    ("settings", "flags", Settings(("--ssl-certfile a: no such file.",)), BROKEN, "--ssl-certfile a", "change"),
    ("machine", "memory", host(), FINE, "60.0 GiB", ""),
    ("machine", "memory", host(memory_left=GIB, group_left=GIB), WARNING, "leaves 1.0 GiB", "docker run --memory"),
    ("machine", "memory", host(memory_left=GIB), WARNING, "1.0 GiB can be used, of 64.0", "end other programs"),
    ("machine", "address space", host(address_left=60 * GIB), FINE, "60.0 GiB", ""),
    ("machine", "address space", host(address_left=1, address_problem="too little"), BROKEN, "too", "ulimit -v"),
    ("machine", "processors", host(), FINE, "4 cores are used", ""),
    ("machine", "processors", host(quota=2.5, allowed=6), FINE, "6 of them for this process (affinity); the quota", ""),
    ("machine", "processors", host(quota=0.5), WARNING, "0.5", "--cpus"),
    ("machine", "threads", host(binding={"OMP_PROC_BIND": "true"}), WARNING, "OMP_PROC_BIND=true", "unset OMP"),
    ("machine", "large pages", host(huge_pages="madvise"), FINE, "madvise", ""),
    ("machine", "large pages", host(huge_pages="never"), WARNING, "off", "transparent_hugepage"),
    ("machine", "shared memory", host(num_gpus=8, shared=64 << 20), WARNING, "64.0 MiB", "--shm-size"),
    ("machine", "shared memory", host(ranks=2, shared=None), BROKEN, "not there", "tmpfs"),
    ("machine", "shared memory", host(num_gpus=2, shared=2 * GIB, shared_usable=False), BROKEN, "written", "tmpfs"),
    ("machine", "shared memory", host(num_gpus=2, shared=2 * GIB), FINE, "2.0 GiB", ""),
    ("machine", "open files", host(files=65536), FINE, "65,536", ""),
    ("machine", "open files", host(files=256), WARNING, "256", "nofile=65536"),
    ("machine", "open files", host(files=4096, connections=4096), BROKEN, "--max-concurrent-requests is 4,096", "655"),
    ("machine", "processes", host(processes=4096), FINE, "4,096", ""),
    ("machine", "processes", host(processes=64), WARNING, "64", "--pids-limit"),
    ("folders", "kernels", places(), FINE, "/c/octavo (9.0 GiB free)", ""),
    ("folders", "kernels", places(kernels=folder(writable=False)), WARNING, "/c can't be", "OCTAVO_KERNEL_CACHE"),
    ("folders", "kernels", places(kernels=folder(free=1 << 20)), WARNING, "1.0 MiB left", "OCTAVO_KERNEL_CACHE"),
    ("folders", "kernels", places(kernels=folder(executes=False)), WARNING, "noexec", "OCTAVO_KERNEL_CACHE"),
    ("folders", "Triton's kernels", places(triton=folder(writable=False)), WARNING, "/c", "TRITON_CACHE_DIR"),
    ("folders", "models", places(models=(folder(), folder(free=GIB))), WARNING, "1.0 GiB left", "--download-dir"),
    ("folders", "models", places(models=(folder(executes=False),)), FINE, "/c/octavo", ""),
    ("folders", "jobs", places(jobs=folder(writable=False)), WARNING, "batches", "--jobs-dir"),
    ("folders", "temporary files", places(temporary=folder(writable=False)), BROKEN, "/c", "TMPDIR"),
    ("folders", "temporary files", places(temporary=None), BROKEN, "no folder", "TMPDIR"),
    ("folders", "temporary files", places(temporary=folder(free=0)), WARNING, "0 B left", "TMPDIR"),
    ("server", "address", Door(address="127.0.0.1:8000"), FINE, "127.0.0.1:8000", ""),
    ("server", "address", Door(address="h:1", problem="in use"), WARNING, "in use", "--port"),
    ("server", "address", Door(address="h:1", problem="in use", stated=True), BROKEN, "in use", "--port"),
    ("server", "proxy", Door(address="h:1", proxy="http://p:3128"), WARNING, "http://p:3128", "no_proxy=127.0.0.1"),
    ("model hub", "network", Hub(), FINE, "--online", ""),
    ("model hub", "network", Hub(offline="HF_HUB_OFFLINE"), FINE, "HF_HUB_OFFLINE", ""),
    ("model hub", "network", Hub(asked=True, status=200, proxy="http://p"), FINE, "through the proxy http://p", ""),
    ("model hub", "network", Hub(asked=True, problem="no route"), WARNING, "no route", "https_proxy"),
    ("model hub", "network", Hub(asked=True, status=503), WARNING, "503", "later"),
    ("model hub", "access token", Hub(asked=True, status=200, has_token=True), FINE, "takes it", ""),
    ("model hub", "access token", Hub(asked=True, status=200), FINE, "none", ""),
    ("model hub", "access token", Hub(asked=True, status=401, has_token=True), BROKEN, "401", "HF_TOKEN"),
    ("GPUs", "driver", Gpus(problem="no library"), FINE, "no NVIDIA GPU", ""),
    ("GPUs", "driver", Gpus(problem="no library", wanted=True), BROKEN, "--device cuda", "leave --device cuda out"),
    ("GPUs", "driver", Gpus(problem="no library", on_bus=2), BROKEN, "2 NVIDIA GPUs", "--gpus all"),
    ("GPUs", "driver", Gpus(problem="status 18", has_device=True), BROKEN, "status 18", "restart"),
    ("GPUs", "driver", driven(cuda_library=False), BROKEN, "libcuda", "NVIDIA_DRIVER_CAPABILITIES"),
    ("GPUs", "driver", driven(), FINE, "580.65.06, for CUDA up to 13.0", ""),
    ("GPUs", "GPUs", driven(), FINE, "GPU 0 NVIDIA H200, 140.0 GiB", ""),
    ("GPUs", "GPUs", driven(states=(), all_states=()), BROKEN, "no GPU", "nvidia-smi"),
    ("GPUs", "GPUs", driven(states=(), visible="7"), BROKEN, "'7' names none of the 1", "unset"),
    ("GPUs", "GPUs", driven(ranks=2), BROKEN, "needs 2 GPUs", "lower it"),
    ("GPUs", "Triton", driven(has_triton=False), BROKEN, "not installed", "octavo[gpu]"),
    ("GPUs", "memory", driven(), FINE, "free", ""),
    ("GPUs", "memory", driven(USED, setups={0: GpuSetup(processes=((77, 11 * GIB),))}), WARNING, "process 77", "smi"),
    ("GPUs", "memory errors", driven(), FINE, "no uncorrected", ""),
    ("GPUs", "memory errors", driven(gpu(ecc_uncorrected=2)), WARNING, "2 uncorrected", "--gpu-reset"),
    ("GPUs", "memory errors", driven(setups={0: GpuSetup(repair_pending=True)}), WARNING, "next reset", "--gpu-reset"),
    ("GPUs", "memory errors", driven(setups={0: GpuSetup(repair_failed=True)}), BROKEN, "any more", "replace"),
    ("GPUs", "clocks", driven(gpu(slowed=("power_cap",))), FINE, "not lowered", ""),
    ("GPUs", "clocks", driven(gpu(slowed=("thermal",), temperature_c=91)), WARNING, "at 91 degrees", "cooling"),
    ("GPUs", "power limit", driven(gpu(power_limit_w=350.0), setups={0: USUAL_POWER}), WARNING,
     "350 W instead of 700 W", "-pl"),
    ("GPUs", "compute mode", driven(setups={0: GpuSetup(compute_mode="prohibited")}), BROKEN, "no programs", "-c"),
    ("GPUs", "compute mode", driven(setups={0: EXCLUSIVE}), BROKEN, "and 5 uses it", "-c DEFAULT"),
    ("GPUs", "MIG", driven(setups={0: GpuSetup(mig=True)}), WARNING, "divided", "nvidia-smi -L"),
    ("GPUs", "MIG", driven(setups={0: GpuSetup(mig=True)}, visible="MIG-1"), FINE, "names", ""),
    ("GPUs", "MIG", driven(*TWO, setups={0: GpuSetup(mig=True)}, ranks=2), BROKEN, "--tensor-parallel-size", "-mig 0"),
    ("GPUs", "peer access", driven(*TWO), FINE, "reach", ""),
    ("GPUs", "peer access", driven(*TWO, setups={1: GpuSetup(no_peers=(0,))}), WARNING, "GPUs 0 and 1", "topo -p2p"),
    ("CPU kernels", "compiler", cpu_kernels(), FINE, "g++", ""),
    ("CPU kernels", "compiler", cpu_kernels(compilers=()), WARNING, "no C++ compiler", "apt-get install g++"),
    ("CPU kernels", "kernels", cpu_kernels(), FINE, "avx512", ""),
    ("CPU kernels", "kernels", cpu_kernels(level="avx2"), WARNING, "has avx512, but /usr/bin/g++", "newer compiler"),
    ("CPU kernels", "kernels", cpu_kernels(level="avx2", isa="avx2"), FINE, "avx2", ""),
    ("CPU kernels", "kernels", cpu_kernels(problem="g++ ended"), WARNING, "g++ ended", "CXX"),
    ("CPU kernels", "kernels", cpu_kernels(problem="has avx2", isa="avx512"), BROKEN, "--cpu-isa avx512", "leave"),
    ("torch", "torch", torch(), FINE, "2.11.0, built for CUDA 13.0", ""),
    ("torch", "torch", torch(died="it was ended by SIGILL"), BROKEN, "SIGILL", "--force-reinstall torch"),
    ("torch", "torch", torch(probe={"torch_error": "libcudart.so.13"}), BROKEN, "libcudart.so.13", "--force-reinstall"),
    ("torch", "torch", torch(probe={"cpu_error": "wrong numbers"}), BROKEN, "wrong numbers", "--force-reinstall"),
    ("torch", "GPU build", torch(), FINE, "NVIDIA H200", ""),
    ("torch", "GPU build", torch(probe={"cuda": "", "available": False}), BROKEN, "built for CPUs", "pip config list"),
    ("torch", "GPU build", torch(driver_cuda=(12, 8)), BROKEN, "CUDA up to 12.8", "built for CUDA 12"),
    ("torch", "GPU build", torch(probe={"available": False, "unavailable": "too old"}), BROKEN, "too old", "restart"),
    ("torch", "GPU build", torch(probe={"gpus": [("GTX 1080", (6, 1))]}), BROKEN, "GTX 1080 (compute capability 6.1)",
     "built for this GPU"),
    ("torch", "GPU build", torch(probe={"gpu_error": "out of memory"}), WARNING, "out of memory", "nvidia-smi"),
    ("torch", "GPU build", torch(probe={"gpu_error": "no kernel image"}), BROKEN, "no kernel image", "dmesg"),
    ("torch", "Triton", torch(), FINE, "Triton 3.6.0", ""),
    ("torch", "Triton", torch(probe={"triton": ""}), BROKEN, "not installed", "octavo[gpu]"),
    ("torch", "Triton", torch(probe={"triton_error": "no libtriton"}), BROKEN, "no libtriton", "--force-reinstall"),
    ("torch", "Triton", torch(probe={"kernel_error": "error: Python.h"}), BROKEN, "Python.h", "python3-dev"),
    ("torch", "Triton", torch(probe={"kernel_error": "Failed to find C compiler"}), BROKEN, "C compiler", "gcc"),
    ("torch", "Triton", torch(probe={"kernel_error": "ptxas"}), BROKEN, "ptxas", "TRITON_CACHE_DIR"),
    ("torch", "Triton", torch(probe={"gpu_error": "lost"}), WARNING, "no kernel was tried", "above"),
    ("model", "files", found(), FINE, "2.0 GiB of weights", ""),
    ("model", "files", found(absent="octavo pull smollm2"), FINE, "octavo pull smollm2", ""),
    ("model", "files", found(weight_bytes=0), FINE, "without weights", ""),
    ("model", "files", found(problem="is corrupt"), BROKEN, "is corrupt", "octavo pull --list"),
    ("model", "tokenizer and chat template", found(), FINE, "can be used", ""),
    ("model", "tokenizer and chat template", found(text_problem="no tokenizer"), BROKEN, "no tokenizer", "--tokenizer"),
    ("model", "tokenizer and chat template", found(chats=False), WARNING, "no chat template", "--chat-template"),
    ("model", "architecture", found(), FINE, "LlamaForCausalLM", ""),
    ("model", "architecture", found(config_problem="not known"), BROKEN, "not known", "docs/models.md"),
    ("model", "memory", found(), FINE, "2.0 GiB of the 60.0 GiB", ""),
    ("model", "memory", found(memory=GIB), BROKEN, "take 2.0 GiB, and 1.0 GiB", "quantized"),
    ("model", "memory", found(memory=int(2.2 * GIB)), WARNING, "little is left", "smaller"),
    ("model", "memory", found(gpu="H200", longest=4096), FINE, "up to 4,096 tokens", ""),
    ("model", "memory", found(gpu="H200", missing=GIB), BROKEN, "1.0 GiB of memory are missing", "octavo plan"),
]  # fmt: skip
NOT_HERE: list[tuple[str, str, Any]] = [
    ("packages", "versions", python(needs_python="")),
    ("packages", "Ray", python()),
    ("packages", "traces", python()),
    ("machine", "address space", host()),
    ("machine", "threads", host()),
    ("machine", "large pages", host()),
    ("machine", "shared memory", host(num_gpus=1, shared=64 << 20)),
    ("machine", "open files", host()),
    ("machine", "processes", host()),
    ("server", "proxy", Door(address="h:1")),
    ("model hub", "access token", Hub()),
    ("model hub", "access token", Hub(asked=True, problem="no route", has_token=True)),
    *(("GPUs", check.name, Gpus(problem="no library")) for check in gpus.AREA.checks[1:]),
    ("GPUs", "power limit", driven(gpu(power_limit_w=700.0), setups={0: USUAL_POWER})),
    ("GPUs", "compute mode", driven(setups={0: GpuSetup(compute_mode="exclusive process", processes=())})),
    ("GPUs", "MIG", driven()),
    ("GPUs", "peer access", driven()),
    ("CPU kernels", "kernels", cpu_kernels(compilers=())),
    ("CPU kernels", "kernels", cpu_kernels(tried=False)),
    ("torch", "GPU build", torch(has_gpu=False)),
    ("torch", "GPU build", torch(for_gpu=False)),
    ("torch", "Triton", torch(probe={"available": False})),
    ("model", "tokenizer and chat template", found(text_problem=None)),
    ("model", "architecture", found(config_problem=None)),
    ("model", "memory", found(memory=None)),
]
"""Facts of machines that a check does not concern."""


def judged(area: str, name: str, facts: Any) -> Finding | None:
    (check,) = (one for one in AREAS[area].checks if one.name == name)
    return check.judge(facts)


@pytest.mark.parametrize(("area", "name", "facts", "result", "text", "remedy"), CASES)
def test_what_is_found(area: str, name: str, facts: Any, result: Result, text: str, remedy: str) -> None:
    finding = judged(area, name, facts)
    assert finding is not None
    assert finding.result is result, finding
    assert text in finding.text
    assert remedy in finding.remedy
    assert bool(finding.remedy) == (result is not FINE), "what is wrong has a remedy"


@pytest.mark.parametrize(("area", "name", "facts"), NOT_HERE)
def test_what_has_no_meaning_here_is_left_out(area: str, name: str, facts: Any) -> None:
    assert judged(area, name, facts) is None


def test_every_check_is_seen_to_fail() -> None:
    own = (packages, settings, machine, folders, server, hub, gpus, kernels, torch_checks, model)
    all_checks = {(module.AREA.name, check.name) for module in own for check in module.AREA.checks}
    assert all_checks == {(area, name) for area, name, _, result, *_ in CASES if result is not FINE}


@pytest.mark.parametrize(
    ("built_for", "capability", "runs"),
    [
        (["sm_80", "sm_90"], (9, 0), True),
        (["sm_80"], (8, 9), True),
        (["sm_80"], (9, 0), False),
        (["sm_80", "compute_80"], (9, 0), True),
        (["sm_90"], (8, 0), False),
        (["sm_90a"], (9, 0), True),
        (["sm_100", "sm_120"], (12, 0), True),
        ([], (7, 5), True),
    ],
)
def test_which_gpus_torch_has_kernels_for(built_for: list[str], capability: tuple[int, int], runs: bool) -> None:
    assert torch_checks.runs_on(capability, Probe(built_for=built_for)) is runs
