"""Adapters in host memory: checked once, and the same bytes by any number of threads."""

from __future__ import annotations

import dataclasses
import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from octavo.core.errors import ModelFileError
from octavo.features.lora import reader as reader_module
from octavo.features.lora.adapter_file import AdapterFile, unpacked
from octavo.features.lora.checks import read_adapter
from octavo.features.lora.layout import Geometry, Target, TargetPart
from octavo.features.lora.payload import Reading, Source
from octavo.features.lora.reader import Reader
from octavo.features.lora.targets import Targets
from octavo.features.lora.worker import LoraWorker
from octavo.nn.shard import Cut

TARGETS = tuple(
    Target(f"model.layers.{i}", (TargetPart("q_proj", 48, 32, 48, 32), TargetPart("k_proj", 48, 16, 48, 16)))
    for i in range(5)
)


def no_gains(*_: object) -> Tensor:
    raise AssertionError("without magnitudes")


@pytest.fixture
def reader() -> Reader:
    layers = (nn.Identity(),) * len(TARGETS)
    places = Targets(TARGETS, layers, ((Cut(), Cut()),) * len(TARGETS), ((None, None),) * len(TARGETS))  # type: ignore[arg-type]
    return Reader(places, Geometry(3, 1024, 4), torch.float32, no_gains)


def save(folder: Path, seed: int, rank: int = 3) -> None:
    made = torch.Generator().manual_seed(seed)
    tensors = {}
    for target in TARGETS:
        for part in target.parts:
            path = f"base_model.model.{target.path}.{part.name}"
            tensors[f"{path}.lora_A.weight"] = torch.randn(rank, part.inputs, generator=made)
            tensors[f"{path}.lora_B.weight"] = torch.randn(part.outputs, rank, generator=made)
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank}))


def reading(folder: Path, file: AdapterFile, *, known: bool = True) -> Reading:
    source = Source(str(folder), file.manifest, file=file.packed() if known else b"")
    return Reading(1, (source,), file.manifest)


def test_files_that_have_not_changed_are_checked_once(
    reader: Reader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, seed=1)
    file = read_adapter(tmp_path, TARGETS, 8)
    assert unpacked(file.packed()) == file
    _, expected, _ = reader.read(reading(tmp_path, file, known=False))
    monkeypatch.setattr(reader_module, "read_adapter", None)
    assert torch.equal(reader.read(reading(tmp_path, file))[1], expected)


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_files_that_have_changed_are_checked_again(name: str, reader: Reader, tmp_path: Path) -> None:
    save(tmp_path, seed=1)
    file = read_adapter(tmp_path, TARGETS, 8)
    before = reader.read(reading(tmp_path, file))[1]
    content = (tmp_path / name).read_bytes()
    (tmp_path / name).unlink()
    (tmp_path / name).write_bytes(content)
    assert not file.unchanged
    assert torch.equal(reader.read(reading(tmp_path, file))[1], before), "the same content is fine"
    save(tmp_path, seed=1, rank=2)
    with pytest.raises(ModelFileError, match="has changed since the adapter was loaded"):
        reader.read(reading(tmp_path, file))


def test_files_that_change_while_they_are_read_are_refused(
    reader: Reader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else pages could be of either content, and prefixes that they compute would be found with the other."""
    save(tmp_path, seed=1)
    file = read_adapter(tmp_path, TARGETS, 8)
    run = reader_module._run

    def slow(*args: Any) -> None:
        run(*args)
        save(tmp_path, seed=2)

    monkeypatch.setattr(reader_module, "_run", slow)
    with pytest.raises(ModelFileError, match="changed while it was read"):
        reader.read(reading(tmp_path, file))


def test_files_that_are_written_anew_while_they_are_read_are_refused(reader: Reader, tmp_path: Path) -> None:
    """A mapped file that becomes shorter would end the process (SIGBUS)."""
    save(tmp_path, seed=1)
    file = read_adapter(tmp_path, TARGETS, 8)
    found = reader.open(reading(tmp_path, file))
    os.truncate(file.weights, 100)
    with pytest.raises(ModelFileError, match="changed while it was read"):
        found.read(None)


def test_versions_change_with_the_files_even_if_their_times_are_restored(reader: Reader, tmp_path: Path) -> None:
    save(tmp_path, seed=1)
    file = read_adapter(tmp_path, TARGETS, 8)
    versions = [reader.read(reading(tmp_path, file))[2] for _ in range(2)]
    weights = tmp_path / "adapter_model.safetensors"
    before = weights.stat()
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))
    versions.append(reader.read(reading(tmp_path, file))[2])
    assert versions[0] == versions[1] != versions[2]


def test_files_that_are_gone_are_an_error(reader: Reader, tmp_path: Path) -> None:
    save(tmp_path, seed=1)
    file = read_adapter(tmp_path, TARGETS, 8)
    (tmp_path / "adapter_model.safetensors").unlink()
    with pytest.raises(ModelFileError, match=r"has no adapter_model\.safetensors"):
        reader.read(reading(tmp_path, file))


@pytest.mark.parametrize(("rank", "rooms"), [(4, (10, 2)), (256, (16, 8))])
def test_pinned_memory_is_bounded(rank: int, rooms: tuple[int, int], reader: Reader) -> None:
    """Two adapters on their way have room; of larger ones, parts."""
    worker = LoraWorker(8, rank)
    worker._targets, worker._geometry = reader.targets, dataclasses.replace(reader.geometry, by_output=True)
    worker._site = SimpleNamespace(device=SimpleNamespace(resident=True))  # type: ignore[assignment]
    assert worker.rooms(1 << 20) == rooms
    worker._site = SimpleNamespace(device=SimpleNamespace(resident=False))  # type: ignore[assignment]
    assert worker.rooms(1 << 20) == (0, 0)


def test_threads_fill_the_same_pages(reader: Reader, tmp_path: Path) -> None:
    save(tmp_path, seed=2)
    file = read_adapter(tmp_path, TARGETS, 8)
    _, expected, _ = reader.read(reading(tmp_path, file))
    with ThreadPoolExecutor(3) as helpers:
        _, pages, _ = dataclasses.replace(reader, helpers=helpers).read(reading(tmp_path, file))
    assert pages.count_nonzero() > 1000
    assert torch.equal(pages, expected)
