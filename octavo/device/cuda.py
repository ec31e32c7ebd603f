"""`CudaDevice`: one NVIDIA GPU."""

from __future__ import annotations

import importlib.util
import logging

import torch

from octavo.core.errors import ConfigError, DeviceLostError
from octavo.core.gpus import GRAPHS, UTILIZATION, default_limits
from octavo.device.base import too_large
from octavo.device.binding import bind
from octavo.device.cuda_transfer import CudaLink
from octavo.device.lost import reason_lost

log = logging.getLogger(__name__)

_GIB = 1 << 30
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_WAYS_OUT = (
    "Take a smaller model or one with smaller weights, keep weights in the host's memory (--cpu-offload-gb), raise "
    "--gpu-memory-utilization, or free memory that other processes hold on this GPU (nvidia-smi lists them). octavo "
    "plan MODEL says what would be enough."
)


def check_usable() -> None:
    """Raise ConfigError if this machine can't compute on a GPU. No memory of a GPU is taken."""
    if not torch.cuda.is_available():
        raise ConfigError(
            "--device cuda needs an NVIDIA GPU, its driver and a torch built for CUDA, and torch finds none; "
            "use --device cpu. octavo doctor says what is wrong."
        )
    if importlib.util.find_spec("triton") is None:
        raise ConfigError("--device cuda needs the package triton; install octavo[gpu], or use --device cpu.")


class CudaDevice(CudaLink):
    """Launches only enqueue, so one step is always launched ahead.

    Raises:
        ConfigError: there is no usable GPU, or Triton is not installed.
    """

    def __init__(self) -> None:
        check_usable()
        super().__init__(torch.device("cuda", torch.cuda.current_device()))
        self.name = torch.cuda.get_device_name(self.torch_device)
        self.default_depth = 1
        self.default_limits = default_limits(torch.cuda.get_device_properties(self.torch_device).total_memory)
        self.largest_step = 2 * self.default_limits[1]
        self.balanced_tokens = 512
        self.resident = True
        self.engines = 1

    def setup(self, threads: int | None, binding: str, rank: int = 0, size: int = 1) -> None:
        if binding != "auto":
            bind(binding, rank=rank, size=size)
        if threads is not None:
            torch.set_num_threads(threads)
        torch.cuda.init()

    def pick_dtype(self, wanted: str, checkpoint: str | None) -> torch.dtype:
        if wanted != "auto":
            return _DTYPES[wanted]
        if checkpoint == "float16" or torch.cuda.get_device_capability(self.torch_device) < (8, 0):
            return torch.float16
        return torch.float32 if checkpoint == "float32" else torch.bfloat16

    def check_fits(self, weights: int, stored: int, utilization: float | None) -> None:
        room = self._room(utilization)
        if weights >= room:
            raise ConfigError(
                f"The weights take {weights / _GIB:.2f} GiB, but {max(room, 0) / _GIB:.2f} GiB of {self.name}'s memory "
                f"can be used. {_WAYS_OUT}"
            )

    def most_kv(self, utilization: float | None, weights: int) -> int:
        return max(0, self._room(utilization) - weights - GRAPHS)

    def kv_budget(self, utilization: float | None, weights: int, workspace: int = 0) -> int:
        """Return what the utilization leaves besides memory in use now, with weights, and the workspace of steps."""
        budget = self._room(utilization) - workspace - GRAPHS
        log.info(
            "memory in GiB: weights %.2f, activations %.2f, graphs %.2f, KV cache %.2f, of %.2f",
            *(size / _GIB for size in (weights, workspace, GRAPHS, budget, self._memory()[1])),
        )
        if budget <= 0:
            raise ConfigError(
                f"After {weights / _GIB:.2f} GiB of weights and {(workspace + GRAPHS) / _GIB:.2f} GiB for computing, "
                f"no memory of {self.name} is left for the KV cache. Lower --max-num-batched-tokens or --max-num-seqs, "
                f"or do one of these: {_WAYS_OUT}"
            )
        return budget

    def give_back(self) -> None:
        torch.cuda.synchronize(self.torch_device)
        torch.cuda.empty_cache()

    def loss(self, error: Exception) -> DeviceLostError | None:
        reason = reason_lost(error, self.torch_device)
        return None if reason is None else DeviceLostError(f"{self.name} ({self.torch_device})", reason)

    def check_cache(self, size: int, workspace: int) -> None:
        free, _, idle = self._memory()
        if size + workspace > free + idle:
            raise ConfigError(too_large(size, free + idle, workspace, self.name))

    def _room(self, utilization: float | None) -> int:
        """Return the bytes that may still be allocated; memory cached by torch counts as free.

        Alone, the utilization includes what other processes use. Of several engines, each has a part of its own: the
        utilization that was set for it, or an equal part of the default, as far as the others have left it free.
        """
        free, total, idle = self._memory()
        used = total - free - idle
        if self.engines == 1:
            return int(total * (utilization or UTILIZATION)) - used
        part = int(total * (utilization or UTILIZATION / self.engines))
        own = torch.cuda.memory_allocated(self.torch_device)
        return min(part - own, int(total * max(utilization or 0, UTILIZATION)) - used)

    def _memory(self) -> tuple[int, int, int]:
        """Return bytes: free, total, and cached by torch."""
        free, total = torch.cuda.mem_get_info(self.torch_device)
        idle = torch.cuda.memory_reserved(self.torch_device) - torch.cuda.memory_allocated(self.torch_device)
        return free, total, idle
