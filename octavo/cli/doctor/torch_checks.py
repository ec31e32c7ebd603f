"""torch and Triton, tried in a process of their own (`probe.py`)."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from dataclasses import dataclass

import msgspec

from octavo.cli.doctor.check import Area, Check, Finding, Wish, broken, fine, warning
from octavo.cli.doctor.gpus import num_on_bus
from octavo.cli.doctor.probe import Probe
from octavo.core.nvml import Nvml, NvmlError
from octavo.device.early import DRIVER

_PATIENCE_S = 300
"""Importing torch from a cold disk takes a minute, and Triton's first kernel some seconds."""
_INSTALL = f"{sys.executable} -m pip install --force-reinstall torch"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """What the probe found, and what it is compared with.

    Attributes:
        died: how the probe's process ended without an answer; "" if it gave one.
        has_gpu: this machine has an NVIDIA GPU that its driver serves.
        driver_cuda: the newest CUDA that the driver supports.
        for_gpu: the settings may use a GPU.
    """

    probe: Probe
    died: str = ""
    has_gpu: bool = False
    driver_cuda: tuple[int, int] | None = None
    for_gpu: bool = True


def read(wish: Wish) -> Tried | None:
    if wish.quick:
        return None
    for_gpu = wish.engine.device.device != "cpu"
    probe, died = run_probe([sys.executable, "-m", "octavo.cli.doctor.probe", *(["--gpu"] if for_gpu else [])])
    return Tried(
        probe=probe,
        died=died,
        has_gpu=DRIVER.exists() or num_on_bus() > 0,
        driver_cuda=_driver_cuda() if for_gpu else None,
        for_gpu=for_gpu,
    )


def run_probe(command: list[str], patience_s: float = _PATIENCE_S) -> tuple[Probe, str]:
    """Run the probe; return its answer, and how it ended if it gave none."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=patience_s, check=False)
    except subprocess.TimeoutExpired:
        return Probe(), f"it had not ended after {patience_s:g} s"
    lines = done.stdout.strip().splitlines()
    if done.returncode == 0 and lines:
        return msgspec.json.decode(lines[-1], type=Probe), ""
    told = (done.stderr.strip().splitlines() or ["without a message"])[-1]
    code = done.returncode
    how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
    return Probe(), f"it {how}: {told[:300]}"


def _driver_cuda() -> tuple[int, int] | None:
    try:
        nvml = Nvml.load()
    except NvmlError:
        return None
    found = nvml.cuda_version
    nvml.close()
    return found


def judge_torch(found: Tried) -> Finding:
    if found.died:
        return broken(f"a process that imports torch and computes failed: {found.died}", _INSTALL)
    probe = found.probe
    if probe.torch_error:
        return broken(f"torch can't be imported: {probe.torch_error}", _INSTALL)
    if probe.cpu_error:
        return broken(f"torch {probe.torch} computes nothing on the CPU: {probe.cpu_error}", _INSTALL)
    built = f"for CUDA {probe.cuda}" if probe.cuda else "for CPUs"
    return fine(f"torch {probe.torch}, built {built}; imported in {probe.import_s:.1f} s")


def judge_build(found: Tried) -> Finding | None:
    """Compare torch's build with the GPU and the driver."""
    probe = found.probe
    if not probe.torch or not found.for_gpu or not found.has_gpu:
        return None
    if not probe.cuda:
        return broken(
            f"torch {probe.torch} is built for CPUs, and this machine has an NVIDIA GPU, which is not used",
            f"{_INSTALL} (`{sys.executable} -m pip config list` shows whether pip is set to an index of CPU builds)",
        )
    major = int(probe.cuda.partition(".")[0])
    if found.driver_cuda is not None and found.driver_cuda[0] < major:
        return broken(
            f"torch is built for CUDA {probe.cuda}, and the driver supports CUDA up to "
            f"{found.driver_cuda[0]}.{found.driver_cuda[1]}",
            f"update NVIDIA's driver, or install a torch that is built for CUDA {found.driver_cuda[0]}",
        )
    if not probe.available:
        return broken(
            f"torch can't use the GPU: {probe.unavailable or 'it finds none'}",
            "octavo doctor says more about the driver and CUDA_VISIBLE_DEVICES above; restart the machine after an "
            "update of the driver",
        )
    unbuilt = [f"{name} (compute capability {a}.{b})" for name, (a, b) in probe.gpus if not runs_on((a, b), probe)]
    if unbuilt:
        return broken(
            f"torch {probe.torch} has no kernels for {', '.join(unbuilt)}; it has {', '.join(probe.built_for)}",
            "install a torch that is built for this GPU: a newer one for a new GPU, an older one for an old one",
        )
    if "out of memory" in probe.gpu_error:
        return warning(
            f"no GPU computation was tried to its end: {probe.gpu_error}",
            "nvidia-smi lists the processes that hold the GPU's memory; if one is your server, all is well",
        )
    if probe.gpu_error:
        return broken(f"torch computes nothing on the GPU: {probe.gpu_error}", "nvidia-smi, and dmesg, say more")
    return fine(f"it computes on {', '.join(name for name, _ in probe.gpus)}")


def runs_on(capability: tuple[int, int], probe: Probe) -> bool:
    """Return whether torch has kernels for a GPU. Binaries run on GPUs of the same major version that are not older;
    intermediate code is compiled for all that are not older (CUDA C++ Programming Guide, Application Compatibility)."""
    for word in probe.built_for:
        kind, _, number = word.partition("_")
        digits = re.match(r"\d+", number)
        if digits is None:
            continue
        have = divmod(int(digits[0]), 10)
        if have <= capability and (kind == "compute" or have[0] == capability[0]):
            return True
    return not probe.built_for


def judge_kernel(found: Tried) -> Finding | None:
    probe = found.probe
    if not probe.available:
        return None
    if probe.triton_error:
        return broken(f"Triton can't be imported: {probe.triton_error}", "pip install --force-reinstall triton")
    if not probe.triton:
        return broken("Triton is not installed", "pip install 'octavo[gpu]', or pip install triton")
    if probe.kernel_error:
        return broken(f"a kernel can't be compiled or run: {probe.kernel_error}", _kernel_remedy(probe.kernel_error))
    if probe.gpu_error:
        return warning("no kernel was tried, since torch computes nothing there", "see above")
    return fine(f"Triton {probe.triton} compiled a kernel, which gives the right numbers")


def _kernel_remedy(error: str) -> str:
    if "Python.h" in error:
        return "install Python's headers: apt-get install python3-dev, or dnf install python3-devel"
    if "compiler" in error.lower() or "gcc" in error:
        return "install a C compiler: apt-get install gcc, or dnf install gcc"
    return "pip install --force-reinstall triton, and remove its cache (~/.triton/cache, or TRITON_CACHE_DIR)"


AREA = Area(
    "torch", read, (Check("torch", judge_torch), Check("GPU build", judge_build), Check("Triton", judge_kernel))
)
