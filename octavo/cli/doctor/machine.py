"""Memory, processors and limits of this machine or its container."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from octavo.cli.doctor.check import Area, Check, Finding, Wish, broken, fine, listed, warning
from octavo.cli.flags.units import show_bytes
from octavo.core.errors import ConfigError
from octavo.core.memory import address_space_left, check_address_space
from octavo.device import cgroup
from octavo.device.host import available_memory, physical_cores
from octavo.device.visible import DEVICES

_GIB = 1 << 30
_LEAST_MEMORY = 2 * _GIB
"""Less leaves little for a model beside the libraries and the KV cache."""
_LEAST_SHARED = _GIB
_SHARED = Path("/dev/shm")
_HUGE = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_FEW_PROCESSES = 256
_FEW_FILES = 1024
_FILES_BESIDE = 128
"""Open files of a server besides its clients' connections, about."""
_BINDING = ("OMP_PROC_BIND", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")
_UNBOUND = ("", "false", "disabled", "none")


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What this process may use. Sizes in bytes; None where there is no limit, or it can't be read.

    Attributes:
        memory, memory_left: of the machine; what may still be used here.
        group_left: what the control group leaves of it.
        address_problem: why libraries can't be loaded into the address space; "" if they can.
        address_left: by which the address space may still grow.
        cpus, allowed, cores, quota: hardware threads of the machine, those that this process may use, the physical
            cores that Octavo takes, and the control group's quota.
        binding: variables that bind OpenMP's threads.
        huge_pages: the system's policy: always, madvise or never.
        shared, shared_usable: size of /dev/shm, and whether files can be made there.
        num_gpus: device files of GPUs.
        ranks: GPUs that the settings divide the model over.
        files: most open files.
        connections: most requests at once, if there is a limit.
        processes: most processes and threads.
    """

    memory: int
    memory_left: int
    group_left: int | None = None
    address_problem: str = ""
    address_left: int | None = None
    cpus: int = 1
    allowed: int = 1
    cores: int = 1
    quota: float | None = None
    binding: Mapping[str, str] = field(default_factory=dict)
    huge_pages: str = ""
    shared: int | None = None
    shared_usable: bool = True
    num_gpus: int = 0
    ranks: int = 1
    files: int | None = None
    connections: int | None = None
    processes: int | None = None


def read(wish: Wish) -> Machine:
    affinity = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    files, processes = _limits()
    return Machine(
        memory=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        memory_left=available_memory(),
        group_left=cgroup.memory_left(),
        address_problem=_address_problem(),
        address_left=address_space_left(),
        cpus=os.cpu_count() or 1,
        allowed=len(affinity),
        cores=physical_cores(),
        quota=cgroup.cpu_quota(),
        binding={name: os.environ[name] for name in _BINDING if os.environ.get(name, "").lower() not in _UNBOUND},
        huge_pages=_policy(cgroup.read(_HUGE) or ""),
        shared=shutil.disk_usage(_SHARED).total if _SHARED.is_dir() else None,
        shared_usable=os.access(_SHARED, os.W_OK),
        num_gpus=len(list(DEVICES.glob("nvidia[0-9]*"))),
        ranks=wish.engine.parallel.tensor_parallel_size,
        files=files,
        connections=wish.server.max_concurrent_requests,
        processes=_least(processes, cgroup.most_processes()),
    )


def _address_problem() -> str:
    try:
        check_address_space()
    except ConfigError as error:
        return str(error)
    return ""


def _policy(text: str) -> str:
    """Return the chosen word of a line such as "always [madvise] never"."""
    return text.partition("[")[2].partition("]")[0]


def _limits() -> tuple[int | None, int | None]:
    """Return the most open files, and the most processes of this user; the server raises its own to the hard limit."""
    try:
        import resource
    except ImportError:  # Windows has no such limits
        return None, None
    found = (resource.getrlimit(kind)[1] for kind in (resource.RLIMIT_NOFILE, resource.RLIMIT_NPROC))
    files, processes = (None if limit == resource.RLIM_INFINITY else limit for limit in found)
    return files, processes


def _least(*limits: int | None) -> int | None:
    return min((limit for limit in limits if limit is not None), default=None)


def judge_memory(found: Machine) -> Finding:
    left, there = show_bytes(found.memory_left), show_bytes(found.memory)
    limited = found.group_left is not None and found.group_left < found.memory
    text = f"{left} can be used, of {there}"
    if limited:
        text += f"; the limit of this container or service leaves {show_bytes(found.group_left or 0)}"
    if found.memory_left < _LEAST_MEMORY:
        how = "raise the container's limit (docker run --memory, resources.limits.memory, MemoryMax=)"
        return warning(text, how if limited else "end other programs, or take a machine with more memory")
    return fine(text)


def judge_address_space(found: Machine) -> Finding | None:
    if found.address_left is None:
        return None
    if found.address_problem:
        return broken(found.address_problem, "ulimit -v unlimited")
    return fine(f"it may grow by {show_bytes(found.address_left)} (ulimit -v)")


def judge_cpus(found: Machine) -> Finding:
    text = f"{found.cores} cores are used; the machine has {found.cpus} hardware threads"
    if found.allowed < found.cpus:
        text += f", {found.allowed} of them for this process (affinity)"
    if found.quota is None:
        return fine(text)
    text += f"; the quota of this container or service is {found.quota:g}"
    if found.quota < 1:
        return warning(text, "give it at least one: docker run --cpus, resources.limits.cpu, or CPUQuota=")
    return fine(text)


def judge_threads(found: Machine) -> Finding | None:
    if not found.binding:
        return None
    names = " ".join(found.binding)
    return warning(
        f"{listed(f'{name}={value}' for name, value in found.binding.items())} binds torch's threads to cores; Octavo "
        "binds its own",
        f"unset {names}, and use --cpu-omp-threads-bind if cores are to be chosen",
    )


def judge_huge_pages(found: Machine) -> Finding | None:
    if not found.huge_pages:
        return None
    if found.huge_pages == "never":
        return warning(
            "large pages are off, so reading weights on a CPU needs more address translations",
            f"echo madvise | sudo tee {_HUGE}",
        )
    return fine(f"the system's policy is {found.huge_pages}")


def judge_shared_memory(found: Machine) -> Finding | None:
    if max(found.num_gpus, found.ranks) < 2:
        return None  # only NCCL needs it: ranks on CPUs share memory without a name
    if found.shared is None or not found.shared_usable:
        return broken(
            f"{_SHARED} is not there or can't be written to, and GPUs that divide a model need it",
            f"mount a tmpfs at {_SHARED} (docker run --shm-size 2g; a volume emptyDir with medium: Memory)",
        )
    if found.shared < _LEAST_SHARED:
        return warning(
            f"{_SHARED} has {show_bytes(found.shared)}, too little for several GPUs that divide a model",
            "docker run --shm-size 2g, or --ipc host; in Kubernetes a volume emptyDir with medium: Memory there",
        )
    return fine(f"{_SHARED} has {show_bytes(found.shared)}")


def judge_files(found: Machine) -> Finding | None:
    if found.files is None:
        return None
    needed = (found.connections or _FEW_FILES) + _FILES_BESIDE
    remedy = f"raise the hard limit to {max(needed, 65536)}: docker run --ulimit nofile=65536, LimitNOFILE=65536"
    text = f"at most {found.files:,} open files (ulimit -Hn)"
    if found.connections is not None and found.files < needed:
        return broken(f"{text}, but --max-concurrent-requests is {found.connections:,}", remedy)
    return warning(f"{text}; a connection takes one", remedy) if found.files < needed else fine(text)


def judge_processes(found: Machine) -> Finding | None:
    if found.processes is None:
        return None
    text = f"at most {found.processes:,} processes and threads"
    if found.processes < _FEW_PROCESSES:
        return warning(text, "raise ulimit -u, docker run --pids-limit, or TasksMax=")
    return fine(text)


AREA = Area(
    "machine",
    read,
    (
        Check("memory", judge_memory),
        Check("address space", judge_address_space),
        Check("processors", judge_cpus),
        Check("threads", judge_threads),
        Check("large pages", judge_huge_pages),
        Check("shared memory", judge_shared_memory),
        Check("open files", judge_files),
        Check("processes", judge_processes),
    ),
)
