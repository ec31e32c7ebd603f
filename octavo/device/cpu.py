"""`CpuDevice`: the host's processors and memory."""

from __future__ import annotations

import logging

import torch

from octavo.core.errors import ConfigError, DeviceLostError
from octavo.device import host
from octavo.device.base import too_large
from octavo.device.binding import bind
from octavo.device.lost import reason_lost
from octavo.device.transfer import HostLink

log = logging.getLogger(__name__)

_GIB = 1 << 30
_MOST_THREADS = 1024
_DEFAULT_KV_LIMIT = 4 * _GIB
_DEFAULT_UTILIZATION = 0.5
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class CpuDevice(HostLink):
    """Computes at launch, so running ahead gains nothing: the default depth is 0.

    Attributes:
        available: bytes that were free when it was made.
    """

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.name = host.cpu_name()
        self.default_depth = 0
        self.default_limits = (256, 2048)
        self.largest_step = 2048
        self.balanced_tokens = 16
        self.resident = False
        self.available = host.available_memory()
        self.engines = 1
        self._ranks = 1

    def setup(self, threads: int | None, binding: str, rank: int = 0, size: int = 1) -> None:
        bind(binding, rank=rank, size=size)
        cores = host.physical_cores(size, overlapping=binding == "nobind")
        if threads is not None and threads > _MOST_THREADS:
            raise ConfigError(
                f"--threads {threads} is more than the {_MOST_THREADS:,} that may be; there are {cores} cores."
            )
        if threads is not None and threads > cores:
            log.warning("--threads %d is more than the %d physical cores given to this process", threads, cores)
        torch.set_num_threads(threads or cores)
        self._ranks = size

    def pick_dtype(self, wanted: str, checkpoint: str | None) -> torch.dtype:
        if wanted not in ("auto", "float16"):
            return _DTYPES[wanted]
        brief = wanted == "float16" or checkpoint != "float32"
        chosen = torch.bfloat16 if brief and host.has_fast_bfloat16() else torch.float32
        if wanted == "float16":
            name = str(chosen).removeprefix("torch.")
            log.warning("--dtype float16 is slow and inexact on a CPU: computing in %s instead", name)
        return chosen

    def check_fits(self, weights: int, stored: int, utilization: float | None) -> None:
        """Check the files' size, about that of the weights; the system would kill a process that takes too much."""
        if stored > self.available + host.free_swap():
            raise ConfigError(
                f"The files of the weights hold {stored / _GIB:.2f} GiB, but only {self.available / _GIB:.2f} GiB of "
                "memory are free. Take a smaller model or one with smaller weights (a quantized GGUF), or free memory."
            )

    def most_kv(self, utilization: float | None, weights: int) -> int:
        budget, most = max(0, self.room(utilization) // self._ranks - weights), self.most_cache(utilization)
        return budget if most is None else min(budget, most)

    def room(self, utilization: float | None) -> int:
        """Return the bytes for the weights and KV caches of all ranks of this machine."""
        return int(self.available * (utilization or _DEFAULT_UTILIZATION))

    def most_cache(self, utilization: float | None) -> int | None:
        """Return the limit of a rank's KV cache in bytes; None for none."""
        return None if utilization else _DEFAULT_KV_LIMIT // self.engines

    def kv_budget(self, utilization: float | None, weights: int, workspace: int = 0) -> int:
        """Return half of the available memory less the weights, at most 4 GiB; with a utilization, that fraction.

        At most the memory that is free now less the workspace. Ranks of a machine have equal parts of its memory.
        Engines that share it divide the 4 GiB; what each has loaded is no longer available to the next.
        """
        available = self.available // self._ranks
        budget = self.room(utilization) // self._ranks - weights
        each = f" for each of {self._ranks} ranks" if self._ranks > 1 else ""
        if budget <= 0:
            raise ConfigError(
                f"The weights take {weights / _GIB:.2f} GiB, more than --memory-utilization "
                f"{utilization or _DEFAULT_UTILIZATION} of {available / _GIB:.2f} GiB available memory{each}. Raise "
                "it, set --kv-cache-memory-bytes yourself, use --dtype bfloat16 if it runs in float32, or take a "
                "smaller model."
            )
        free = host.available_memory() // self._ranks
        if free <= workspace:
            raise ConfigError(
                f"With the weights loaded, {free / _GIB:.2f} GiB of memory are free{each}, but the largest step needs "
                f"{workspace / _GIB:.2f} GiB beside the KV cache. Lower --max-num-seqs or --max-num-batched-tokens, "
                "take a smaller model, free memory, or raise what limits it (ulimit -v, the container's limit)."
            )
        return min(budget, free - workspace, budget if utilization else self._default_kv_limit)

    @property
    def _default_kv_limit(self) -> int:
        return _DEFAULT_KV_LIMIT // self.engines

    def give_back(self) -> None:
        host.trim_memory()

    def loss(self, error: Exception) -> DeviceLostError | None:
        reason = reason_lost(error, self.torch_device)
        return None if reason is None else DeviceLostError(self.name, reason)

    def check_cache(self, size: int, workspace: int) -> None:
        """Compare with the memory that is free now, since the system overcommits."""
        free = host.available_memory()
        if size + workspace > free + host.free_swap():
            raise ConfigError(too_large(size, free, workspace, "memory"))
