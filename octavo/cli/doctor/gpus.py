"""NVIDIA GPUs and their driver, as NVML and the system show them: no context is created, and torch is not imported."""

from __future__ import annotations

import ctypes
import importlib.util
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from octavo.cli.doctor.check import Area, Check, Finding, Wish, broken, fine, listed, warning
from octavo.cli.flags.units import show_bytes
from octavo.core.gpus import UTILIZATION
from octavo.core.nvml import GpuSetup, GpuState, Nvml, NvmlError, chosen
from octavo.device.cgroup import read as read_file
from octavo.device.early import DRIVER

_PCI = Path("/sys/bus/pci/devices")
_NVIDIA = "0x10de"
_DISPLAY = "0x03"
"""PCI's class of display controllers; those for computing are among them."""
_MUCH = 0.02
"""Fraction of a GPU's memory that others may hold without being worth a warning."""
_FAULTS = ("hardware", "thermal", "hardware_thermal", "power_brake")


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpus:
    """The GPUs of this machine.

    Attributes:
        on_bus: NVIDIA GPUs that the PCI bus shows; a container may show those of others, too.
        has_device: the driver's device file is there.
        problem: why NVML can't be used; "" if it can.
        cuda_library: CUDA's library of the driver (libcuda) can be loaded.
        driver, cuda: versions of the driver, and of the newest CUDA that it supports.
        states, setups: the GPUs that this process may use.
        all_states: all GPUs.
        visible: CUDA_VISIBLE_DEVICES.
        ranks: GPUs that the settings divide the model over.
        has_triton: the package triton is installed.
        wanted: --device cuda is set.
    """

    on_bus: int = 0
    has_device: bool = False
    problem: str = ""
    cuda_library: bool = True
    driver: str = ""
    cuda: tuple[int, int] | None = None
    states: Sequence[GpuState] = ()
    setups: Mapping[int, GpuSetup] = field(default_factory=dict)
    all_states: Sequence[GpuState] = ()
    visible: str | None = None
    ranks: int = 1
    has_triton: bool = True
    wanted: bool = False


def read(wish: Wish) -> Gpus | None:
    if wish.engine.device.device == "cpu":
        return None
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    found = Gpus(
        on_bus=num_on_bus(),
        has_device=DRIVER.exists(),
        visible=visible,
        ranks=wish.engine.parallel.tensor_parallel_size,
        wanted=wish.engine.device.device == "cuda",
        has_triton=importlib.util.find_spec("triton") is not None,
        cuda_library=_loads("libcuda.so.1"),
    )
    try:
        nvml = Nvml.load()
    except NvmlError as error:
        return replace(found, problem=str(error))
    states = nvml.states()
    found = replace(
        found,
        driver=nvml.driver_version or "unknown",
        cuda=nvml.cuda_version,
        states=chosen(states, visible),
        setups=nvml.setups(),
        all_states=states,
    )
    nvml.close()
    return found


def num_on_bus(devices: Path = _PCI) -> int:
    """Return the number of NVIDIA's GPUs on the PCI bus."""
    return sum(
        read_file(one / "vendor") == _NVIDIA and (read_file(one / "class") or "").startswith(_DISPLAY)
        for one in devices.glob("*")
    )


def _loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def judge_driver(found: Gpus) -> Finding | None:
    if found.problem:
        if not found.on_bus and not found.has_device:
            if found.wanted:
                return broken("--device cuda is set, and this machine has no NVIDIA GPU", "leave --device cuda out")
            return fine("this machine has no NVIDIA GPU; models run on the CPU")
        where = "the driver's device file is there" if found.has_device else f"the bus has {found.on_bus} NVIDIA GPUs"
        return broken(
            f"{where}, but the driver can't be used: {found.problem}",
            "in a container, start it with GPUs (docker run --gpus all, with NVIDIA's Container Toolkit); else install "
            "the driver, and restart the machine after an update of it",
        )
    cuda = "unknown" if found.cuda is None else f"{found.cuda[0]}.{found.cuda[1]}"
    if not found.cuda_library:
        return broken(
            f"the driver {found.driver} is there, but its library libcuda.so.1 can't be loaded",
            "in a container, set NVIDIA_DRIVER_CAPABILITIES=compute,utility; else install the driver's CUDA library",
        )
    return fine(f"driver {found.driver}, for CUDA up to {cuda}")


def judge_visible(found: Gpus) -> Finding | None:
    if found.problem:
        return None
    if not found.all_states:
        return broken("the driver finds no GPU", "nvidia-smi, and dmesg | grep -i nvrm, say more")
    names = listed(f"GPU {gpu.index} {gpu.name}, {show_bytes(gpu.memory_total or 0)}" for gpu in found.states)
    if not found.states:
        return broken(
            f"CUDA_VISIBLE_DEVICES={found.visible!r} names none of the {len(found.all_states)} GPUs",
            "unset CUDA_VISIBLE_DEVICES",
        )
    if found.ranks > len(found.states):
        return broken(
            f"--tensor-parallel-size {found.ranks} needs {found.ranks} GPUs, and these can be used: {names}",
            "lower it, or change CUDA_VISIBLE_DEVICES",
        )
    return fine(names)


def judge_triton(found: Gpus) -> Finding | None:
    if found.problem or found.has_triton:
        return None
    return broken(
        "the package triton is not installed, so models run on the CPU",
        "pip install 'octavo[gpu]', or pip install triton",
    )


def judge_memory(found: Gpus) -> Finding | None:
    held = []
    for gpu in found.states:
        if gpu.memory_used is None or not gpu.memory_total or gpu.memory_used <= _MUCH * gpu.memory_total:
            continue
        setup = found.setups.get(gpu.index, GpuSetup())
        users = ", ".join(f"process {pid} {show_bytes(used)}" for pid, used in setup.processes or ())
        held.append(f"GPU {gpu.index}: {show_bytes(gpu.memory_used)} in use{f' ({users})' if users else ''}")
    if not held:
        return None if not found.states else fine("nearly all is free")
    return warning(
        f"{listed(held)}; an engine takes {UTILIZATION:.0%} of the memory, less what others hold",
        "nvidia-smi lists processes: end those that are not needed, or lower --gpu-memory-utilization",
    )


def judge_errors(found: Gpus) -> Finding | None:
    wrong, failed = [], False
    for gpu in found.states:
        setup = found.setups.get(gpu.index, GpuSetup())
        if setup.repair_failed:
            failed = True
            wrong.append(f"GPU {gpu.index}: defective rows of its memory can't be replaced any more")
        elif setup.repair_pending:
            wrong.append(f"GPU {gpu.index}: defective rows of its memory are replaced at its next reset")
        elif gpu.ecc_uncorrected:
            wrong.append(
                f"GPU {gpu.index}: {gpu.ecc_uncorrected} uncorrected memory errors since the driver was loaded"
            )
    if failed:
        return broken(listed(wrong), "replace the GPU (nvidia-smi -q -d ROW_REMAPPER)")
    if wrong:
        return warning(listed(wrong), "end all programs on it and reset it: sudo nvidia-smi --gpu-reset -i GPU")
    return fine("no uncorrected memory errors") if found.states else None


def judge_slowed(found: Gpus) -> Finding | None:
    wrong = []
    for gpu in found.states:
        faults = [name for name in gpu.slowed or () if name in _FAULTS]
        if faults:
            wrong.append(f"GPU {gpu.index} at {gpu.temperature_c} degrees is slowed ({', '.join(faults)})")
    if wrong:
        return warning(
            listed(wrong), "check its cooling and power supply: nvidia-smi -q -d PERFORMANCE,TEMPERATURE,POWER"
        )
    return fine("clocks are not lowered by heat or power supply") if found.states else None


def judge_power(found: Gpus) -> Finding | None:
    low = []
    for gpu in found.states:
        usual = found.setups.get(gpu.index, GpuSetup()).default_power_limit_w
        if usual and gpu.power_limit_w and gpu.power_limit_w < 0.99 * usual:
            low.append(f"GPU {gpu.index} may draw {gpu.power_limit_w:.0f} W instead of {usual:.0f} W")
    return warning(listed(low), "sudo nvidia-smi -i GPU -pl WATTS, unless it is meant so") if low else None


def judge_mode(found: Gpus) -> Finding | None:
    for gpu in found.states:
        setup = found.setups.get(gpu.index, GpuSetup())
        if setup.compute_mode == "prohibited":
            return broken(f"GPU {gpu.index} takes no programs", f"sudo nvidia-smi -i {gpu.index} -c DEFAULT")
        if setup.compute_mode == "exclusive process" and setup.processes:
            return broken(
                f"GPU {gpu.index} takes one process at a time, and {setup.processes[0][0]} uses it",
                f"end that process, or sudo nvidia-smi -i {gpu.index} -c DEFAULT",
            )
    return None


def judge_mig(found: Gpus) -> Finding | None:
    divided = [gpu.index for gpu in found.states if found.setups.get(gpu.index, GpuSetup()).mig]
    if not divided:
        return None
    text = f"GPU {', '.join(map(str, divided))} is divided (MIG): a process uses one instance"
    if found.ranks > 1:
        return broken(
            f"{text}, so --tensor-parallel-size {found.ranks} can't be used",
            "set it to 1, or sudo nvidia-smi -i GPU -mig 0",
        )
    if found.visible and "MIG-" in found.visible:
        return fine(f"{text}, which CUDA_VISIBLE_DEVICES names")
    return warning(
        text, "set CUDA_VISIBLE_DEVICES to the instance's name (nvidia-smi -L), or sudo nvidia-smi -i GPU -mig 0"
    )


def judge_peers(found: Gpus) -> Finding | None:
    if len(found.states) < 2:
        return None
    here = {gpu.index for gpu in found.states}
    apart = sorted(
        {
            (min(index, other), max(index, other))
            for index in here
            for other in found.setups[index].no_peers
            if other in here
        }
    )
    if not apart:
        return fine("GPUs reach each other's memory")
    pairs = ", ".join(f"{first} and {second}" for first, second in apart)
    return warning(
        f"GPUs {pairs} can't reach each other's memory, so the ranks of a divided model exchange by NCCL",
        "nvidia-smi topo -p2p r shows why; in a virtual machine or with IOMMU, ask who set it up",
    )


AREA = Area(
    "GPUs",
    read,
    (
        Check("driver", judge_driver),
        Check("GPUs", judge_visible),
        Check("Triton", judge_triton),
        Check("memory", judge_memory),
        Check("memory errors", judge_errors),
        Check("clocks", judge_slowed),
        Check("power limit", judge_power),
        Check("compute mode", judge_mode),
        Check("MIG", judge_mig),
        Check("peer access", judge_peers),
    ),
)
