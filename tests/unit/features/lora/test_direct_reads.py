"""Pages read straight from a file, in any ranges: the bytes that a plain reading of its tensors gives."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from octavo.core.errors import ModelFileError
from octavo.features.lora.checks import read_adapter
from octavo.features.lora.layout import Geometry, Target, TargetPart
from octavo.features.lora.payload import Reading, Source
from octavo.features.lora.reader import OpenAdapter, Reader
from octavo.features.lora.targets import Targets
from octavo.nn.shard import Cut

WEIGHTS = "adapter_model.safetensors"
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
BLOCK = 3 * 512
"""Bytes. Pieces begin and end within blocks."""


def targets(first: range | None, last: range | None) -> tuple[tuple[Target, ...], tuple[tuple[Cut, ...], ...]]:
    """Return layers of two projections and of one, and a rank's part: outputs of the former, inputs of the latter."""
    outputs = (range(40), range(40, 72)) if first is None else (first,)
    q = TargetPart("q_proj", 512, 72, 512, sum(map(len, outputs)))
    k = TargetPart("k_proj", 512, 600, 512, 600)
    o = TargetPart("o_proj", 1024, 56, 1024 if last is None else len(last), 56)
    made = []
    cuts = []
    for i in range(3):
        made += [Target(f"model.layers.{i}.a", (q, k)), Target(f"model.layers.{i}.b", (o,))]
        cuts += [(Cut(outputs=outputs), Cut()), (Cut(inputs=last),)]
    return tuple(made), tuple(cuts)


def no_gains(*_: object) -> Tensor:
    raise AssertionError("without magnitudes")


def save(folder: Path, every: tuple[Target, ...], rank: int, alpha: float, dtype: torch.dtype) -> None:
    made = torch.Generator().manual_seed(rank)
    tensors = {}
    for target in every:
        for part in target.parts:
            path = f"base_model.model.{target.path}.{part.name}"
            tensors[f"{path}.lora_A.weight"] = torch.randn(rank, part.inputs, generator=made).to(dtype)
            tensors[f"{path}.lora_B.weight"] = torch.randn(part.outputs, rank, generator=made).to(dtype)
    save_file(tensors, folder / WEIGHTS)
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": alpha}))


def opened(folder: Path, every: tuple[Target, ...], cuts: Any, dtype: torch.dtype) -> OpenAdapter:
    count = len(every)
    orders = tuple((None,) * len(one.parts) for one in every)
    places = Targets(every, (nn.Identity(),) * count, cuts, orders)  # type: ignore[arg-type]
    file = read_adapter(folder, every, 64)
    reading = Reading(1, (Source(str(folder), file.manifest, file=file.packed()),), file.manifest)
    reader = Reader(places, Geometry(3, 512, dtype.itemsize, by_output=True), dtype, no_gains)
    return reader.open(reading)


def plain(folder: Path, adapter: OpenAdapter, every: tuple[Target, ...], cuts: Any, dtype: torch.dtype) -> Tensor:
    """Return the pages [n, block bytes] as layout.py describes them."""
    tensors, scale = load_file(folder / WEIGHTS), _scale(folder)
    geometry = adapter.layout.geometry
    pages = torch.zeros(adapter.layout.num_blocks * BLOCK // dtype.itemsize, dtype=dtype)
    tile = geometry.tile_bytes // dtype.itemsize
    for (i, j), span in adapter.layout.spans.items():
        part, cut = every[i].parts[j], cuts[i][j]
        path = f"base_model.model.{every[i].path}.{part.name}"
        a, b = tensors[f"{path}.lora_A.weight"], tensors[f"{path}.lora_B.weight"]
        if a.dtype == dtype and part.inputs < part.outputs and scale in (0.5, 2.0):
            a = (a.float() * scale).to(dtype)
        else:
            b = (b.float() * scale).to(dtype)
        if cut.inputs is not None:
            a = a[:, cut.inputs.start : cut.inputs.stop]
        if cut.outputs is not None:
            b = torch.cat([b[one.start : one.stop] for one in cut.outputs])
        padded = torch.zeros(len(b), geometry.stride(span.rank), dtype=dtype)
        padded[:, : span.rank] = b
        for place, values in ((span.a, a.to(dtype)), (span.b, padded)):
            pages[place * tile : place * tile + values.numel()] = values.flatten()
    return pages.view(torch.uint8).view(-1, BLOCK)


def _scale(folder: Path) -> float:
    config = json.loads((folder / "adapter_config.json").read_text())
    return float(config["lora_alpha"] / config["r"])


CUTS = pytest.mark.parametrize(
    "cut", [(None, None), (range(16, 40), range(512, 1024))], ids=["the whole", "a part of it"]
)


@CUTS
@pytest.mark.parametrize(
    "rank", [3, pytest.param(8, marks=pytest.mark.slow), pytest.param(12, marks=pytest.mark.slow), 16, 48]
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("stored", DTYPES, ids=str)
def test_ranges_have_the_bytes_of_a_plain_reading(
    stored: torch.dtype, dtype: torch.dtype, rank: int, cut: tuple[range | None, range | None], tmp_path: Path
) -> None:
    every, cuts = targets(*cut)
    for alpha in (2.0 * rank, 0.3 * rank, rank):
        save(tmp_path, every, rank, alpha, stored)
        adapter = opened(tmp_path, every, cuts, dtype)
        assert not adapter._sources[0].fills, "all pieces are read directly"
        expected = plain(tmp_path, adapter, every, cuts, dtype)
        assert torch.equal(adapter.read(None), expected)
        for step in (1, 3, len(expected)):
            found = torch.full_like(expected, 255)
            for first in range(0, len(found), step):
                adapter.fill(first, found[first : first + step])
            assert torch.equal(found, expected), f"alpha {alpha}, ranges of {step} pages"


def test_files_of_one_form_are_read_each(tmp_path: Path) -> None:
    every, cuts = targets(None, None)
    found = []
    for number in range(2):
        folder = tmp_path / str(number)
        folder.mkdir()
        save(folder, every, 12, 24.0, torch.bfloat16)
        if number:
            tensors = {name: -values for name, values in load_file(folder / WEIGHTS).items()}
            save_file(tensors, folder / WEIGHTS)
        found.append(folder)
    count = len(every)
    places = Targets(every, (nn.Identity(),) * count, cuts, tuple((None,) * len(one.parts) for one in every))  # type: ignore[arg-type]
    reader = Reader(places, Geometry(3, 512, 2, by_output=True), torch.bfloat16, no_gains)
    for folder in found * 2:
        file = read_adapter(folder, every, 64)
        reading = Reading(1, (Source(str(folder), file.manifest, file=file.packed()),), file.manifest)
        adapter = reader.open(reading)
        pages = torch.full((adapter.layout.num_blocks, BLOCK), 255, dtype=torch.uint8)
        adapter.fill(0, pages)
        assert torch.equal(pages, plain(folder, adapter, every, cuts, torch.bfloat16))


@pytest.mark.parametrize("rank", [8, 12])
def test_a_file_that_becomes_shorter_or_goes_is_an_error(rank: int, tmp_path: Path) -> None:
    every, cuts = targets(None, None)
    save(tmp_path, every, rank, 8.0, torch.bfloat16)
    adapter = opened(tmp_path, every, cuts, torch.bfloat16)
    pages = torch.zeros(adapter.layout.num_blocks, BLOCK, dtype=torch.uint8)
    os.truncate(tmp_path / WEIGHTS, 4000)
    with pytest.raises(ModelFileError, match="changed while it was read"):
        adapter.fill(0, pages)
    (tmp_path / WEIGHTS).unlink()
    with pytest.raises(ModelFileError, match="can't be read"):
        adapter.fill(0, pages)


def test_a_file_that_changes_after_its_bytes_were_read_is_an_error(tmp_path: Path) -> None:
    every, cuts = targets(None, None)
    save(tmp_path, every, 12, 12.0, torch.bfloat16)
    adapter = opened(tmp_path, every, cuts, torch.bfloat16)
    os.utime(tmp_path / WEIGHTS)
    with pytest.raises(ModelFileError, match="changed while it was read"):
        adapter.fill(0, torch.zeros(2, BLOCK, dtype=torch.uint8))
