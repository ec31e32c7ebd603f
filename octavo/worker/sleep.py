"""`WorkerSleep`: frees the memory of weights and KV cache while the engine sleeps, and allocates it again."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import torch
from torch import Tensor

from octavo.core.pausing import SleepTag
from octavo.worker.worker import Worker


class WorkerSleep:
    """The memory of one worker.

    Args:
        keeps_copies: the host memory of the weights is kept while the engine is awake, for the next sleep: pinning as
            much takes far longer than copying it.
    """

    def __init__(self, worker: Worker, *, keeps_copies: bool = False) -> None:
        self._worker = worker
        self._keeps_copies = keeps_copies
        self._kept: list[tuple[torch.UntypedStorage, Tensor]] = []
        self._spare: list[Tensor] = []

    def sleep(self, level: int) -> None:
        """Free the weights' memory of this sleep level; the KV cache is freed with the runner.

        At level 1, weights in host memory stay there. If that fails, the weights freed before are kept for the wake-up.
        """
        worker = self._worker
        if level == 2:
            self._kept, self._spare, worker.model = [], [], None
        elif worker.device.torch_device.type != "cpu":
            for storage in _storages(worker.model):
                self._kept.append((storage, _put_away(storage, self._take_spare(storage.nbytes()))))
        gc.collect()
        worker.device.give_back()

    def wake_up(self, part: SleepTag) -> None:
        """Allocate the memory of one part again; the next runner allocates the KV cache."""
        if part is not SleepTag.WEIGHTS:
            return
        if self._worker.model is None:
            self._worker.load()
        for storage, copy in self._kept:
            storage.resize_(copy.numel())
            _bytes_of(storage).copy_(copy, non_blocking=True)
        if self._kept:
            self._worker.device.synchronize()
        self._spare = [copy for _, copy in self._kept] if self._keeps_copies else []
        self._kept = []

    def _take_spare(self, size: int) -> Tensor | None:
        """Return host memory of an earlier sleep, if there is a piece of this size."""
        place = next((place for place, spare in enumerate(self._spare) if spare.numel() == size), None)
        return None if place is None else self._spare.pop(place)


def _storages(model: object) -> list[torch.UntypedStorage]:
    """Return the device storages of all tensors of a model, without duplicates."""
    elsewhere = ("cpu", "meta")  # the latter have no data: what a bridge's modules don't use
    storages = (tensor.untyped_storage() for tensor in tensors_of(model) if tensor.device.type not in elsewhere)
    return list({storage.data_ptr(): storage for storage in storages if storage.nbytes()}.values())


def tensors_of(value: object, seen: set[int] | None = None) -> Iterator[Tensor]:
    """Yield all tensors that `value` refers to through modules, Octavo's objects and collections."""
    seen = set() if seen is None else seen
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for one in value.values():
            yield from tensors_of(one, seen)
    elif isinstance(value, list | tuple):
        for one in value:
            yield from tensors_of(one, seen)
    elif id(value) not in seen and (isinstance(value, torch.nn.Module) or type(value).__module__.startswith("octavo.")):
        seen.add(id(value))
        for name in [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]:
            yield from tensors_of(getattr(value, name, None), seen)
        yield from tensors_of(getattr(value, "__dict__", {}), seen)


def _put_away(storage: torch.UntypedStorage, copy: Tensor | None = None) -> Tensor:
    """Copy to pinned host memory, from which transfers are fast, and free the device memory.

    Args:
        copy: such memory of the storage's size; None takes new memory.
    """
    if copy is None:
        copy = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=True)
    copy.copy_(_bytes_of(storage))
    storage.resize_(0)
    return copy


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
