"""Failures of the cache while an adapter takes its blocks or gives them back: later requests of it are served."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from lora_toy import fake_files, folders
from test_lora_engine import House

from octavo.cache.lease import Lease
from octavo.core.output import FinishReason
from octavo.schedule.pages import Pages


@pytest.fixture
def house(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> House:
    """An engine with room for one adapter on the device."""
    fake_files(monkeypatch)
    return House(folders(tmp_path, {"a": 1, "b": 2}), max_loras=1)


def fail_once(patch: pytest.MonkeyPatch, owner: type, name: str, *, after: bool) -> None:
    """Have the next call of a function raise, before it has done its work or after."""
    call = getattr(owner, name)

    def failing(*args: Any) -> None:
        patch.setattr(owner, name, call)
        if after:
            call(*args)
        raise KeyError(name)

    patch.setattr(owner, name, failing)


def run(house: House, count: int = 40) -> None:
    for _ in range(count):
        house.worker.turn()
        house.step()


def end_of(house: House, request: str, adapter: str) -> FinishReason | None:
    """Return how a request for an adapter ends."""
    house.ask(request, adapter)
    run(house)
    return house.last[request].finish


def test_a_load_that_can_not_begin_ends_one_request(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(2):  # before the planner asks, which is tried again, and then
        fail_once(monkeypatch, Pages, "load", after=False)
    assert end_of(house, "1", "a") is FinishReason.ERROR
    assert house.scheduler.cache.num_free == 40
    assert end_of(house, "2", "a") is FinishReason.LENGTH


def test_blocks_whose_release_fails_at_an_eviction_are_read_no_more(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    house.ask("1", "a")
    run(house)
    fail_once(monkeypatch, Lease, "release", after=True)
    assert end_of(house, "2", "b") is FinishReason.ERROR
    assert end_of(house, "3", "a") is FinishReason.LENGTH


def test_an_adapter_whose_release_fails_after_a_failed_load_is_loaded_again(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    house.device._mover.failures = 1.0
    fail_once(monkeypatch, Lease, "release", after=True)
    house.ask("1", "a")
    run(house, 8)
    house.device._mover.failures = 0.0
    assert end_of(house, "2", "a") is FinishReason.LENGTH
