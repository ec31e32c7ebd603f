"""`Nvml`: what the driver says about this machine's NVIDIA GPUs, by its library NVML. Creates no context on a GPU.

https://docs.nvidia.com/deploy/nvml-api/
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from ctypes import byref, c_int, c_uint, c_ulonglong, c_void_p
from dataclasses import dataclass
from typing import Any

LIBRARY = "libnvidia-ml.so.1"
_TOO_SMALL = 7
_NAME_BYTES = 96
_CORRECTED, _UNCORRECTED, _SINCE_BOOT = 0, 1, 0
_CORE_TEMPERATURE = 0
_SM_CLOCK, _MEMORY_CLOCK = 1, 2
_PEER_READ = 0
_UNKNOWN_BYTES = (1 << 64) - 1
SLOWED = {
    "power_cap": 0x4,
    "hardware": 0x8,
    "thermal": 0x20,
    "hardware_thermal": 0x40,
    "power_brake": 0x80,
}
"""Reason why clocks are lower than they could be -> its bit (nvmlClocksEventReasons). Idle clocks have none of them."""
COMPUTE_MODES = {0: "default", 1: "exclusive thread", 2: "prohibited", 3: "exclusive process"}


class NvmlError(Exception):
    """NVML can't be loaded or used; the text gives the reason."""


class _Utilization(ctypes.Structure):
    _fields_ = (("gpu", c_uint), ("memory", c_uint))


class _Memory(ctypes.Structure):
    _fields_ = (("total", c_ulonglong), ("free", c_ulonglong), ("used", c_ulonglong))


class _Process(ctypes.Structure):
    _fields_ = (("pid", c_uint), ("used", c_ulonglong), ("instance", c_uint), ("compute_instance", c_uint))


@dataclass(frozen=True, slots=True)
class GpuState:
    """A GPU as it is now. A value is None if the GPU does not report it.

    Attributes:
        index: its number, as in nvidia-smi.
        busy: fraction of the last moments in which a kernel ran, 0 to 1.
        memory_busy: fraction of them in which memory was read or written, 0 to 1.
        memory_used, memory_total: bytes, of all processes.
        power_w, power_limit_w: watts.
        temperature_c: degrees Celsius.
        sm_clock_hz, memory_clock_hz: current clocks.
        slowed: those of `SLOWED` that hold now.
        ecc_corrected, ecc_uncorrected: memory errors since the driver was loaded.
    """

    index: int
    name: str
    uuid: str
    busy: float | None = None
    memory_busy: float | None = None
    memory_used: int | None = None
    memory_total: int | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    temperature_c: int | None = None
    sm_clock_hz: float | None = None
    memory_clock_hz: float | None = None
    slowed: tuple[str, ...] | None = None
    ecc_corrected: int | None = None
    ecc_uncorrected: int | None = None


@dataclass(frozen=True, slots=True)
class GpuSetup:
    """How a GPU is set up, and who uses it. A value is None if the GPU does not report it.

    Attributes:
        default_power_limit_w: watts.
        compute_mode: of `COMPUTE_MODES`.
        mig: it is divided into instances.
        processes: (process id, bytes) of those that compute; 0 bytes if unknown.
        repair_pending, repair_failed: of rows of its memory that are replaced by spare ones.
        no_peers: indices of GPUs whose memory it can't read.
    """

    default_power_limit_w: float | None = None
    compute_mode: str | None = None
    mig: bool | None = None
    processes: tuple[tuple[int, int], ...] | None = None
    repair_pending: bool | None = None
    repair_failed: bool | None = None
    no_peers: tuple[int, ...] = ()


class Nvml:
    """The library, initialized. Calls may take milliseconds, and hang with the driver."""

    def __init__(self, library: Any) -> None:
        """
        Args:
            library: the loaded library: its functions as attributes.

        Raises:
            NvmlError: the library does not find its driver.
        """
        self._library = library
        self._check("nvmlInit_v2")
        count = c_uint()
        self._check("nvmlDeviceGetCount_v2", byref(count))
        self._handles = [self._handle(number) for number in range(count.value)]

    @classmethod
    def load(cls, path: str = LIBRARY) -> Nvml:
        """Load and initialize the driver's library.

        Raises:
            NvmlError: there is none, or it does not find its driver.
        """
        try:
            return cls(ctypes.CDLL(path))
        except OSError as error:
            raise NvmlError(f"{path} can't be loaded: {error}") from error

    def close(self) -> None:
        self._library.nvmlShutdown()

    @property
    def driver_version(self) -> str | None:
        """The driver's version, such as "550.54.15"."""
        return self._text("nvmlSystemGetDriverVersion")

    @property
    def cuda_version(self) -> tuple[int, int] | None:
        """The newest version of CUDA that the driver supports: (major, minor)."""
        found = self._int("nvmlSystemGetCudaDriverVersion_v2", kind=c_int)
        return None if found is None else (found // 1000, found % 1000 // 10)

    def states(self) -> list[GpuState]:
        """Return all GPUs as they are now."""
        return [self._state(index, handle) for index, handle in enumerate(self._handles) if handle is not None]

    def setups(self) -> dict[int, GpuSetup]:
        """Return how each GPU is set up, by its index."""
        return {index: self._setup(handle) for index, handle in enumerate(self._handles) if handle is not None}

    def _state(self, index: int, handle: c_void_p) -> GpuState:
        used, memory = _Utilization(), _Memory()
        has_use = self._call("nvmlDeviceGetUtilizationRates", handle, byref(used))
        has_memory = self._call("nvmlDeviceGetMemoryInfo", handle, byref(memory))
        return GpuState(
            index=index,
            name=self._text("nvmlDeviceGetName", handle) or "unknown",
            uuid=self._text("nvmlDeviceGetUUID", handle) or "",
            busy=used.gpu / 100 if has_use else None,
            memory_busy=used.memory / 100 if has_use else None,
            memory_used=int(memory.used) if has_memory else None,
            memory_total=int(memory.total) if has_memory else None,
            power_w=_scaled(self._int("nvmlDeviceGetPowerUsage", handle), 1e-3),
            power_limit_w=_scaled(self._int("nvmlDeviceGetEnforcedPowerLimit", handle), 1e-3),
            temperature_c=self._int("nvmlDeviceGetTemperature", handle, c_int(_CORE_TEMPERATURE)),
            sm_clock_hz=_scaled(self._int("nvmlDeviceGetClockInfo", handle, c_int(_SM_CLOCK)), 1e6),
            memory_clock_hz=_scaled(self._int("nvmlDeviceGetClockInfo", handle, c_int(_MEMORY_CLOCK)), 1e6),
            slowed=self._slowed(handle),
            ecc_corrected=self._errors(handle, _CORRECTED),
            ecc_uncorrected=self._errors(handle, _UNCORRECTED),
        )

    def _setup(self, handle: c_void_p) -> GpuSetup:
        mode = self._int("nvmlDeviceGetComputeMode", handle)
        corrected, uncorrected, pending, failed = c_uint(), c_uint(), c_uint(), c_uint()
        rows = byref(corrected), byref(uncorrected), byref(pending), byref(failed)
        remaps = self._call("nvmlDeviceGetRemappedRows", handle, *rows)
        current, next_boot = c_uint(), c_uint()
        has_mig = self._call("nvmlDeviceGetMigMode", handle, byref(current), byref(next_boot))
        return GpuSetup(
            default_power_limit_w=_scaled(self._int("nvmlDeviceGetPowerManagementDefaultLimit", handle), 1e-3),
            compute_mode=None if mode is None else COMPUTE_MODES.get(mode, "unknown"),
            mig=bool(current.value) if has_mig else None,
            processes=self._processes(handle),
            repair_pending=bool(pending.value) if remaps else None,
            repair_failed=bool(failed.value) if remaps else None,
            no_peers=tuple(
                index for index, other in enumerate(self._handles) if other is not None and self._apart(handle, other)
            ),
        )

    def _slowed(self, handle: c_void_p) -> tuple[str, ...] | None:
        bits = self._int("nvmlDeviceGetCurrentClocksThrottleReasons", handle, kind=c_ulonglong)
        return None if bits is None else tuple(name for name, bit in SLOWED.items() if bits & bit)

    def _errors(self, handle: c_void_p, kind: int) -> int | None:
        return self._int("nvmlDeviceGetTotalEccErrors", handle, c_int(kind), c_int(_SINCE_BOOT), kind=c_ulonglong)

    def _apart(self, handle: c_void_p, other: c_void_p) -> bool:
        """Return whether a GPU can't read another one's memory."""
        return handle is not other and bool(self._int("nvmlDeviceGetP2PStatus", handle, other, c_int(_PEER_READ)))

    def _processes(self, handle: c_void_p) -> tuple[tuple[int, int], ...] | None:
        """Return the processes that compute on a GPU. Those of other containers have other numbers, or none."""
        function = self._function("nvmlDeviceGetComputeRunningProcesses_v3")
        if function is None:
            return None
        count = c_uint(64)
        for _ in range(3):  # it grows meanwhile
            found = (_Process * count.value)()
            status = function(handle, byref(count), found)
            if status != _TOO_SMALL:
                break
            count.value += 8
        if status:
            return None
        return tuple((int(one.pid), 0 if one.used == _UNKNOWN_BYTES else int(one.used)) for one in found[: count.value])

    def _handle(self, number: int) -> c_void_p | None:
        """Return a GPU's handle; None if it is lost, or may not be used."""
        handle = c_void_p()
        return handle if self._call("nvmlDeviceGetHandleByIndex_v2", c_uint(number), byref(handle)) else None

    def _int(self, name: str, *args: Any, kind: Any = c_uint) -> int | None:
        """Return the number that a function stores through its last argument; None if it fails."""
        found = kind()
        return int(found.value) if self._call(name, *args, byref(found)) else None

    def _text(self, name: str, *args: Any) -> str | None:
        text = ctypes.create_string_buffer(_NAME_BYTES)
        return text.value.decode(errors="replace") if self._call(name, *args, text, c_uint(_NAME_BYTES)) else None

    def _call(self, name: str, *args: Any) -> bool:
        """Call a function; return whether it succeeded. Older libraries lack some, and GPUs don't support all."""
        function = self._function(name)
        return function is not None and function(*args) == 0

    def _check(self, name: str, *args: Any) -> None:
        function = self._function(name)
        status = None if function is None else function(*args)
        if status != 0:
            raise NvmlError(f"{name} failed with status {status}")

    def _function(self, name: str) -> Callable[..., int] | None:
        return getattr(self._library, name, None)


def chosen(states: Sequence[GpuState], stated: str | None) -> list[GpuState]:
    """Return the GPUs that a value of CUDA_VISIBLE_DEVICES names; all for None, and for parts of GPUs (MIG).

    Numbers are read as nvidia-smi's, which CUDA's are if the GPUs are alike, or with CUDA_DEVICE_ORDER=PCI_BUS_ID.
    """
    if stated is None or "MIG-" in stated:
        return list(states)
    found: list[GpuState] = []
    for word in (part.strip() for part in stated.split(",")):
        one = next((gpu for gpu in states if word and (word == str(gpu.index) or gpu.uuid.startswith(word))), None)
        if one is None:
            break  # CUDA ignores what follows a name that it does not know
        found.append(one)
    return found


def _scaled(value: int | None, unit: float) -> float | None:
    return None if value is None else value * unit
