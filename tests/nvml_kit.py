"""A stand-in for NVIDIA's library NVML: GPUs that are there only for `Nvml`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

NOT_SUPPORTED, TOO_SMALL, LOST = 3, 7, 15
GIB = 1 << 30


@dataclass
class FakeGpu:
    """What a GPU reports. None for what it does not support."""

    name: str = "NVIDIA H200"
    uuid: str = "GPU-0a"
    busy: tuple[int, int] | None = (75, 40)
    memory: tuple[int, int] | None = (140 * GIB, 20 * GIB)
    """Total, used."""
    power: tuple[int, int, int] | None = (512_345, 700_000, 700_000)
    """Milliwatts: drawn, limit, default limit."""
    temperature: int | None = 61
    clocks: dict[int, int] = field(default_factory=lambda: {1: 1980, 2: 3201})
    slowed: int | None = 0
    ecc: tuple[int, int] | None = (3, 0)
    """Corrected, uncorrected."""
    mode: int | None = 0
    mig: int | None = 0
    processes: list[tuple[int, int]] = field(default_factory=list)
    rows: tuple[int, int] | None = (0, 0)
    """Repair pending, repair failed."""
    peers_apart: set[int] = field(default_factory=set)
    lost: bool = False


class FakeNvml:
    """The library's functions, called as through ctypes. Handles are the GPUs' numbers plus one."""

    def __init__(self, *gpus: FakeGpu, init: int = 0, cuda: int = 13000) -> None:
        self.gpus, self.init, self.cuda = gpus, init, cuda
        self.before: Callable[[], Any] = lambda: None
        """Called by each reading of a GPU's use."""

    def nvmlInit_v2(self) -> int:
        return self.init

    def nvmlShutdown(self) -> int:
        return 0

    def nvmlDeviceGetCount_v2(self, count: Any) -> int:
        return put(count, len(self.gpus))

    def nvmlDeviceGetHandleByIndex_v2(self, index: Any, handle: Any) -> int:
        return LOST if self.gpus[index.value].lost else put(handle, index.value + 1)

    def nvmlSystemGetDriverVersion(self, text: Any, size: Any) -> int:
        return write(text, "580.65.06", size)

    def nvmlSystemGetCudaDriverVersion_v2(self, version: Any) -> int:
        return put(version, self.cuda)

    def nvmlDeviceGetName(self, handle: Any, text: Any, size: Any) -> int:
        return write(text, self.gpu(handle).name, size)

    def nvmlDeviceGetUUID(self, handle: Any, text: Any, size: Any) -> int:
        return write(text, self.gpu(handle).uuid, size)

    def nvmlDeviceGetUtilizationRates(self, handle: Any, found: Any) -> int:
        self.before()
        return put_fields(found, ("gpu", "memory"), self.gpu(handle).busy)

    def nvmlDeviceGetMemoryInfo(self, handle: Any, found: Any) -> int:
        return put_fields(found, ("total", "used"), self.gpu(handle).memory)

    def nvmlDeviceGetPowerUsage(self, handle: Any, found: Any) -> int:
        return put_one(found, self.gpu(handle).power, 0)

    def nvmlDeviceGetEnforcedPowerLimit(self, handle: Any, found: Any) -> int:
        return put_one(found, self.gpu(handle).power, 1)

    def nvmlDeviceGetPowerManagementDefaultLimit(self, handle: Any, found: Any) -> int:
        return put_one(found, self.gpu(handle).power, 2)

    def nvmlDeviceGetTemperature(self, handle: Any, sensor: Any, found: Any) -> int:
        assert sensor.value == 0
        return put(found, self.gpu(handle).temperature)

    def nvmlDeviceGetClockInfo(self, handle: Any, kind: Any, found: Any) -> int:
        return put(found, self.gpu(handle).clocks.get(kind.value))

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: Any, found: Any) -> int:
        return put(found, self.gpu(handle).slowed)

    def nvmlDeviceGetTotalEccErrors(self, handle: Any, kind: Any, since: Any, found: Any) -> int:
        assert since.value == 0
        return put_one(found, self.gpu(handle).ecc, kind.value)

    def nvmlDeviceGetComputeMode(self, handle: Any, found: Any) -> int:
        return put(found, self.gpu(handle).mode)

    def nvmlDeviceGetMigMode(self, handle: Any, current: Any, pending: Any) -> int:
        return put(current, self.gpu(handle).mig)

    def nvmlDeviceGetRemappedRows(
        self, handle: Any, corrected: Any, uncorrected: Any, pending: Any, failed: Any
    ) -> int:
        rows = self.gpu(handle).rows
        return put_one(pending, rows, 0) or put_one(failed, rows, 1)

    def nvmlDeviceGetP2PStatus(self, handle: Any, other: Any, kind: Any, found: Any) -> int:
        return put(found, 5 if other.value - 1 in self.gpu(handle).peers_apart else 0)

    def nvmlDeviceGetComputeRunningProcesses_v3(self, handle: Any, count: Any, found: Any) -> int:
        processes = self.gpu(handle).processes
        room, count._obj.value = count._obj.value, len(processes)
        if len(processes) > room:
            return TOO_SMALL
        for place, (pid, used) in zip(found, processes, strict=False):
            place.pid, place.used = pid, used
        return 0

    def gpu(self, handle: Any) -> FakeGpu:
        return self.gpus[handle.value - 1]


def put(pointer: Any, value: int | None) -> int:
    """Store a value as the library does; return the status."""
    if value is None:
        return NOT_SUPPORTED
    pointer._obj.value = value
    return 0


def put_one(pointer: Any, values: tuple[int, ...] | None, place: int) -> int:
    return put(pointer, None if values is None else values[place])


def put_fields(pointer: Any, names: tuple[str, ...], values: tuple[int, ...] | None) -> int:
    if values is None:
        return NOT_SUPPORTED
    for name, value in zip(names, values, strict=True):
        setattr(pointer._obj, name, value)
    return 0


def write(text: Any, value: str, size: Any) -> int:
    assert size.value > len(value)
    text.value = value.encode()
    return 0
