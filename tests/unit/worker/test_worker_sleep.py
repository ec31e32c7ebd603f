"""Weights that are moved to the host in a sleep, with host memory in place of a GPU's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest
import torch
from torch import Tensor

from octavo.core.pausing import SleepTag
from octavo.worker import sleep
from octavo.worker.sleep import WorkerSleep
from octavo.worker.worker import Worker


class Weights:
    """A model of two tensors on a simulated device, whose moves to the host fail from number `fails_at` on."""

    def __init__(self, patch: pytest.MonkeyPatch, fails_at: int, *, keeps_copies: bool = False) -> None:
        self.tensors = [torch.arange(4.0), torch.arange(8.0)]
        self.fails_at = fails_at
        self.moved = 0
        device = SimpleNamespace(torch_device=torch.device("cuda"), give_back=lambda: None, synchronize=lambda: None)
        self.reused: list[int] = []
        worker = cast("Worker", SimpleNamespace(device=device, model=self))
        self.sleep = WorkerSleep(worker, keeps_copies=keeps_copies)
        patch.setattr(sleep, "_storages", lambda model: model.storages)
        patch.setattr(sleep, "_put_away", self._put_away)

    @property
    def storages(self) -> list[torch.UntypedStorage]:
        return [storage for one in self.tensors if (storage := one.untyped_storage()).nbytes()]

    @property
    def whole(self) -> bool:
        return all(torch.equal(one, torch.arange(float(len(one)))) for one in self.tensors)

    def _put_away(self, storage: torch.UntypedStorage, spare: Tensor | None) -> Tensor:
        self.reused += [] if spare is None else [spare.numel()]
        if self.moved == self.fails_at:
            raise RuntimeError("no pinned memory is left")
        self.moved += 1
        copy = torch.frombuffer(bytearray(bytes(storage)), dtype=torch.uint8)
        storage.resize_(0)
        return copy


def test_weights_survive_a_sleep_that_fails_in_the_middle(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = Weights(monkeypatch, fails_at=1)
    with pytest.raises(RuntimeError, match="pinned"):
        weights.sleep.sleep(1)
    assert len(weights.storages) == 1
    weights.sleep.wake_up(SleepTag.WEIGHTS)
    assert weights.whole


def test_a_sleep_that_failed_goes_on_when_it_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = Weights(monkeypatch, fails_at=1)
    with pytest.raises(RuntimeError, match="pinned"):
        weights.sleep.sleep(1)
    weights.fails_at = -1
    weights.sleep.sleep(1)
    assert not weights.storages
    weights.sleep.wake_up(SleepTag.WEIGHTS)
    assert weights.whole


@pytest.mark.parametrize("keeps_copies", [False, True])
def test_host_memory_is_kept_for_the_next_sleep_if_asked_for(
    monkeypatch: pytest.MonkeyPatch, keeps_copies: bool
) -> None:
    weights = Weights(monkeypatch, fails_at=-1, keeps_copies=keeps_copies)
    for _ in range(2):
        weights.sleep.sleep(1)
        assert not weights.storages
        weights.sleep.wake_up(SleepTag.WEIGHTS)
        assert weights.whole
    assert weights.reused == ([16, 32] if keeps_copies else [])


def test_tensors_without_data_are_not_moved() -> None:
    """Such as those that no module of a bridge uses."""
    assert not sleep._storages(torch.nn.Linear(2, 2, device="meta"))
