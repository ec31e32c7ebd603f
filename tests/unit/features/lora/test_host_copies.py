"""Copies of adapters in the host's memory: loads need them only after the first one."""

from __future__ import annotations

import json
import threading
from concurrent.futures import wait
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from octavo.core.futures import done
from octavo.features.lora.checks import read_adapter
from octavo.features.lora.host import HostCopy
from octavo.features.lora.layout import Geometry, Manifest, Target, TargetPart, joined
from octavo.features.lora.payload import Reading, Source, page_names
from octavo.features.lora.reader import OpenAdapter, Reader
from octavo.features.lora.targets import Targets
from octavo.features.lora.worker import LoraWorker
from octavo.nn.shard import Cut

TARGETS = tuple(Target(f"model.layers.{i}", (TargetPart("q_proj", 256, 72, 256, 72),)) for i in range(5))
WEIGHTS = "adapter_model.safetensors"


def no_gains(*_: object) -> Tensor:
    raise AssertionError("without magnitudes")


def save(folder: Path, seed: int, rank: int = 16) -> None:
    made = torch.Generator().manual_seed(seed)
    tensors = {}
    for target in TARGETS:
        path = f"base_model.model.{target.path}.q_proj"
        tensors[f"{path}.lora_A.weight"] = torch.randn(rank, 256, generator=made).bfloat16()
        tensors[f"{path}.lora_B.weight"] = torch.randn(72, rank, generator=made).bfloat16()
    save_file(tensors, folder / WEIGHTS)
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": rank}))


@pytest.fixture
def reader() -> Reader:
    count = len(TARGETS)
    places = Targets(TARGETS, (nn.Identity(),) * count, ((Cut(),),) * count, ((None,),) * count)  # type: ignore[arg-type]
    return Reader(places, Geometry(3, 1024, 2, by_output=True), torch.bfloat16, no_gains)


def reading(folder: Path) -> Reading:
    file = read_adapter(folder, TARGETS, 16)
    return Reading(1, (Source(str(folder), file.manifest, file=file.packed()),), file.manifest)


@pytest.fixture
def adapter(reader: Reader, tmp_path: Path) -> OpenAdapter:
    save(tmp_path, seed=1)
    return reader.open(reading(tmp_path))


def room(adapter: OpenAdapter) -> Tensor:
    return torch.full((adapter.layout.num_blocks, 3072), 255, dtype=torch.uint8)


def test_pages_are_the_same_from_the_file_and_from_memory(adapter: OpenAdapter, tmp_path: Path) -> None:
    copy, expected, first, second = HostCopy(adapter, None), adapter.read(None), room(adapter), room(adapter)
    assert copy.fill(0, first)
    assert not copy.made
    copy.make()
    assert copy.made
    (tmp_path / WEIGHTS).unlink()
    assert copy.fill(0, second)
    assert torch.equal(first, expected)
    assert torch.equal(second, expected)
    assert first.any()


def test_pages_past_the_last_are_left_alone(adapter: OpenAdapter) -> None:
    count = adapter.layout.num_blocks
    for pages in (None, adapter.read(None)):
        into = torch.full((3, 3072), 255, dtype=torch.uint8)
        assert HostCopy(adapter, pages).fill(count - 1, into)
        assert torch.equal(into[0], adapter.read(None)[-1])
        assert into[1:].eq(255).all()
        assert HostCopy(adapter, pages).fill(count, into)


def test_files_that_have_changed_are_not_mixed_with_what_was_read(adapter: OpenAdapter, tmp_path: Path) -> None:
    copy, pages = HostCopy(adapter, None), room(adapter)
    assert copy.fill(0, pages[:2])
    save(tmp_path, seed=2)
    assert not copy.fill(2, pages[2:])
    copy.make()
    assert not copy.made


@pytest.mark.parametrize("made", [False, True])
def test_a_copy_that_was_dropped_is_neither_made_nor_loaded(made: bool, adapter: OpenAdapter) -> None:
    copy = HostCopy(adapter, adapter.read(None) if made else None)
    copy.drop()
    copy.make()
    assert not copy.made
    assert not copy.fill(0, room(adapter))


def test_a_copy_that_is_dropped_while_it_is_made_is_not_kept(
    adapter: OpenAdapter, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy, read = HostCopy(adapter, None), OpenAdapter.read

    def slow(*args: Any) -> Tensor:
        copy.drop()
        return read(*args)

    monkeypatch.setattr(OpenAdapter, "read", slow)
    copy.make()
    assert not copy.made


@pytest.fixture
def worker(reader: Reader) -> LoraWorker:
    made = LoraWorker(8, 64)
    made._reader = reader
    made._site = SimpleNamespace(device=SimpleNamespace(resident=True))  # type: ignore[assignment]
    return made


def test_the_first_load_reads_the_file_and_later_ones_memory(
    worker: LoraWorker, reader: Reader, tmp_path: Path
) -> None:
    save(tmp_path, seed=1)
    layout, expected, _ = reader.read(reading(tmp_path))
    names = page_names(1, layout.num_blocks)
    worker.call("read", msgspec.to_builtins(reading(tmp_path))).result(10)
    for _ in range(2):
        found = torch.full_like(expected, 255)
        parts = [worker.load(names[i : i + 2], partial(found.narrow, 0, i, 2)) for i in range(0, len(names), 2)]
        wait(parts)
        assert all(not part.result() for part in parts)
        assert torch.equal(found, expected)
        worker._host._copiers.submit(int).result(10)  # behind the copy
        (tmp_path / WEIGHTS).unlink(missing_ok=True)
    worker.call("drop", {"uid": 1})
    assert worker.load(names, lambda: found).result(10) == range(len(names))


def test_other_adapters_are_read_at_once(worker: LoraWorker, tmp_path: Path) -> None:
    """Sums are of several files."""
    save(tmp_path, seed=1, rank=12)
    both = reading(tmp_path).sources * 2
    worker.call("read", msgspec.to_builtins(Reading(1, both, joined([one.manifest for one in both])))).result(10)
    (tmp_path / WEIGHTS).unlink()
    copy = worker._host.copies[1]
    assert copy.made
    assert copy.fill(0, torch.empty(copy.layout.num_blocks, 3072, dtype=torch.uint8))


def test_files_that_are_not_in_the_page_cache_are_read_at_once(
    worker: LoraWorker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loads of other adapters must not wait for a slow disk."""
    save(tmp_path, seed=1)
    monkeypatch.setattr("octavo.features.lora.reader._cached", lambda path: False)
    worker.call("read", msgspec.to_builtins(reading(tmp_path))).result(10)
    assert worker._host.copies[1].made


def test_a_layout_is_kept_until_the_adapter_is_forgotten(worker: LoraWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    """An adapter in blocks may have its first step long after its copy in the host's memory was dropped."""
    monkeypatch.setattr(
        worker._host, "read", lambda reader, reading: done(SimpleNamespace(layout=reading.uid, version=""))
    )
    for uid in range(300):
        worker.call("read", msgspec.to_builtins(Reading(uid, (), Manifest(())))).result(10)
        worker.call("drop", {"uid": uid})
    assert list(worker._layouts) == list(range(300))
    for uid in range(1, 300):
        worker.call("forget", {"uid": uid})
    assert list(worker._layouts) == [0]


def named(folder: Path, uid: int) -> dict[str, Any]:
    """Return the arguments of a read."""
    found: dict[str, Any] = msgspec.to_builtins(msgspec.structs.replace(reading(folder), uid=uid))
    return found


def test_files_in_the_page_cache_do_not_wait_for_those_on_a_disk(
    worker: LoraWorker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = [tmp_path / name for name in ("disk", "cache")]
    for folder in folders:
        folder.mkdir()
        save(folder, seed=1)
    go, read = threading.Event(), OpenAdapter.read

    def slow(*args: Any) -> Tensor:
        assert go.wait(10)
        return read(*args)

    monkeypatch.setattr("octavo.features.lora.reader._cached", lambda path: path.parent.name == "cache")
    monkeypatch.setattr(OpenAdapter, "read", slow)
    waiting = [worker.call("read", named(folders[0], uid)) for uid in range(4)]
    worker.call("read", named(folders[1], 4)).result(10)
    assert not any(one.done() for one in waiting)
    go.set()
    wait(waiting)
    assert [worker._host.copies[uid].made for uid in range(5)] == [True] * 4 + [False]


def test_a_copy_is_made_once_nothing_is_loaded(worker: LoraWorker, tmp_path: Path) -> None:
    save(tmp_path, seed=1)
    for uid in (1, 2):
        worker.call("read", named(tmp_path, uid)).result(10)
    copies, go, count = worker._host.copies, threading.Event(), worker._layouts[1].num_blocks
    pages = torch.zeros(count, 3072, dtype=torch.uint8)

    def late() -> Tensor:
        assert go.wait(10)
        return pages.clone()

    other = worker.load(page_names(2, count), late)
    assert worker.load(page_names(1, count), lambda: pages).result(10) == ()
    behind = worker._host._copiers.submit(lambda: copies[1].made)
    assert not behind.done()
    assert not copies[1].made
    go.set()
    assert other.result(10) == ()
    assert behind.result(10)


def test_the_end_of_a_program_waits_for_one_copy_at_most(
    worker: LoraWorker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each takes as long as a read of the whole adapter."""
    save(tmp_path, seed=1)
    for uid in (1, 2, 3):
        worker.call("read", named(tmp_path, uid)).result(10)
    host, begun, go, read = worker._host, threading.Event(), threading.Event(), OpenAdapter.read

    def slow(*args: Any) -> Tensor:
        begun.set()
        assert go.wait(10)
        return read(*args)

    monkeypatch.setattr(OpenAdapter, "read", slow)
    count = worker._layouts[1].num_blocks
    for uid in (1, 2, 3, 2):
        assert worker.load(page_names(uid, count), lambda: torch.zeros(count, 3072, dtype=torch.uint8)).result(10) == ()
    assert begun.wait(10)
    assert len(host._unmade) == 3
    with monkeypatch.context() as patch:
        patch.setattr("concurrent.futures.thread._shutdown", True)  # as at the interpreter's end
        go.set()
        host._copiers.shutdown()
    assert [host.copies[uid].made for uid in (1, 2, 3)] == [True, False, False]


def test_all_copies_are_made_one_after_the_other(worker: LoraWorker, tmp_path: Path) -> None:
    save(tmp_path, seed=1)
    uids = range(1, 6)
    for uid in uids:
        worker.call("read", named(tmp_path, uid)).result(10)
    count = worker._layouts[1].num_blocks
    pages = torch.zeros(count, 3072, dtype=torch.uint8)
    wait([worker.load(page_names(uid, count), pages.clone) for uid in uids])
    while worker._host._unmade:
        worker._host._copiers.submit(int).result(10)  # behind the copy that is being made
    assert all(worker._host.copies[uid].made for uid in uids)
