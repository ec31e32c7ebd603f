"""Adapters that were read and put into blocks have the values of their files, in both forms of B."""

from __future__ import annotations

import json
import math
import os
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import gguf
import msgspec
import pytest
import torch
from adapter_kit import FORMS
from adapters_in_blocks import World
from safetensors.torch import save_file
from torch import Tensor, nn

from octavo.core.errors import ModelFileError
from octavo.device.transfer import link_of
from octavo.features.lora import direct
from octavo.features.lora.adapter_file import unpacked
from octavo.features.lora.checks import read_adapter
from octavo.features.lora.delta import Weights
from octavo.features.lora.direct import DirectReads
from octavo.features.lora.layout import Geometry, Layout, Target, TargetPart, joined
from octavo.features.lora.payload import Reading, Source
from octavo.features.lora.reader import Reader
from octavo.features.lora.tables import Tables
from octavo.features.lora.targets import Targets
from octavo.nn.shard import Cut

HOST = link_of(torch.device("cpu"))
SIZES = {"q_proj": (256, 128), "k_proj": (256, 40), "o_proj": (72, 256), "lm_head": (48, 131)}
"""Inputs and outputs. A row fills whole tiles of 512 bytes, or does not."""
CUTS = {
    "whole": dict.fromkeys(SIZES, Cut()),
    "by outputs": {name: Cut(outputs=(range(o // 2, o // 4 * 3),)) for name, (_, o) in SIZES.items()},
    "several ranges": {name: Cut(outputs=(range(8), range(o - 24, o))) for name, (_, o) in SIZES.items()},
    "by inputs": {name: Cut(inputs=range(i // 4, i // 2)) for name, (i, _) in SIZES.items()},
}
Pair = tuple[Tensor, Tensor]


def targets_of(cuts: dict[str, Cut]) -> Targets:
    found = []
    for name, (inputs, outputs) in SIZES.items():
        cut = cuts[name]
        own = inputs if cut.inputs is None else len(cut.inputs), cut.num_outputs(outputs)
        found.append(Target("" if name == "lm_head" else "model.layers.0", (TargetPart(name, inputs, outputs, *own),)))
    layers = (nn.Identity(),) * len(found)
    return Targets(tuple(found), layers, tuple((cuts[name],) for name in SIZES), ((None,),) * len(found))  # type: ignore[arg-type]


def no_gains(*_: object) -> Tensor:
    raise AssertionError("without magnitudes")


def save(folder: Path, rank: int, alpha: float, dtype: torch.dtype, seed: int) -> dict[str, Pair]:
    folder.mkdir()
    made = torch.Generator().manual_seed(seed)
    pairs, tensors = {}, {}
    for name, (inputs, outputs) in SIZES.items():
        pairs[name] = a, b = (
            torch.randn(rank, inputs, generator=made).to(dtype),
            torch.randn(outputs, rank, generator=made).to(dtype),
        )
        path = f"base_model.model.{name if name == 'lm_head' else f'model.layers.0.{name}'}"
        tensors |= {f"{path}.lora_A.weight": a, f"{path}.lora_B.weight": b}
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return pairs


class InBlocks:
    """The sum of some adapters in blocks, in random order among blocks of NaN."""

    def __init__(
        self, folders: dict[Path, float], targets: Targets, *, by_output: bool, dtype: torch.dtype, slice_bytes: int
    ) -> None:
        self.geometry = Geometry(3, slice_bytes, dtype.itemsize, by_output)
        files = [read_adapter(folder, targets.targets, 64) for folder in folders]
        manifest = joined([file.manifest for file in files]) if len(files) > 1 else files[0].manifest
        sources = [Source(str(one), file.manifest, folders[one]) for one, file in zip(folders, files, strict=True)]
        reader = Reader(targets, self.geometry, dtype, no_gains)
        self.layout, pages, _ = reader.read(Reading(1, tuple(sources), manifest))
        blocks = random.Random(1).sample(range(len(pages) + 3), len(pages))
        memory = torch.full((3, len(pages) + 3, slice_bytes), 255, dtype=torch.uint8)
        memory[:, blocks] = pages.view(len(pages), 3, slice_bytes).transpose(0, 1)
        tables = Tables(targets.targets, self.geometry, 1, len(pages), HOST)
        tables.enter(0, blocks, self.layout)
        self.weights = Weights(SimpleNamespace(memory=memory), tables, dtype, HOST)  # type: ignore[arg-type]
        self.parts = [target.parts[0] for target in targets.targets]

    def pair(self, target: int) -> Pair:
        """Return A [rank, inputs] and B [outputs, rank] as they are in the blocks, float32."""
        span, part = self.layout.spans[target, 0], self.parts[target]
        a = self.weights.rows(0, span.a, span.rank, part.own_inputs)
        return a, self.weights.b(0, span, part.own_outputs).t()


def check(found: Pair, given: Pair, cut: Cut, scale: float, dtype: torch.dtype) -> None:
    a, b = (one.float() for one in given)
    a, b = a if cut.inputs is None else a[:, cut.inputs.start : cut.inputs.stop], cut.rows_of(b)
    plain, scaled = (a, (b * scale).to(dtype).float()), (a * scale, b)
    exact = abs(math.frexp(scale)[0]) == 0.5
    rounded = [tuple(one.to(dtype).float() for one in pair) for pair in ([plain, scaled] if exact else [plain])]
    assert any(torch.equal(found[0], one) and torch.equal(found[1], other) for one, other in rounded)


@FORMS
@pytest.mark.parametrize("rank", [1, 4, 8, 12, 16, 24, 64])
@pytest.mark.parametrize(
    ("stored", "dtype", "factor"),
    [
        (torch.bfloat16, torch.bfloat16, 2.0),
        (torch.bfloat16, torch.bfloat16, 1.5),
        (torch.float32, torch.bfloat16, 0.3),
        (torch.float32, torch.bfloat16, 2.0),
        (torch.bfloat16, torch.float32, 1.0),
        (torch.float16, torch.float16, 1.0),
    ],
    ids=str,
)
def test_values_are_those_of_the_file(
    by_output: bool, rank: int, stored: torch.dtype, dtype: torch.dtype, factor: float, tmp_path: Path
) -> None:
    pairs = save(tmp_path / "adapter", rank, rank * factor, stored, seed=rank)
    for cuts in CUTS.values():
        for slice_bytes in (512, 48):
            found = InBlocks(
                {tmp_path / "adapter": 1.0},
                targets_of(cuts),
                by_output=by_output,
                dtype=dtype,
                slice_bytes=slice_bytes,
            )
            for target, name in enumerate(SIZES):
                check(found.pair(target), pairs[name], cuts[name], factor, dtype)


@FORMS
@pytest.mark.parametrize("ranks", [(1, 4), (8, 16), (5, 3, 12)], ids=str)
@pytest.mark.parametrize("cut", CUTS)
def test_a_sum_has_the_ranks_of_its_adapters_in_order(
    by_output: bool, ranks: tuple[int, ...], cut: str, tmp_path: Path
) -> None:
    weights = (2.0, 0.3, -1.0)
    folders = {tmp_path / str(i): weights[i] for i in range(len(ranks))}
    pairs = [save(folder, ranks[i], ranks[i], torch.bfloat16, seed=i) for i, folder in enumerate(folders)]
    found = InBlocks(folders, targets_of(CUTS[cut]), by_output=by_output, dtype=torch.bfloat16, slice_bytes=512)
    for target, name in enumerate(SIZES):
        a, b = found.pair(target)
        each = zip(a.split(ranks), b.split(ranks, dim=1), pairs, weights, strict=False)
        for one, other, given, weight in each:
            check((one, other), given[name], CUTS[cut][name], weight, torch.bfloat16)


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("factor", [1.0, 2.0, 0.3])
@pytest.mark.parametrize("threads", [0, 3])
@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float32], ids=str)
def test_direct_reads_are_those_through_torch(
    cut: str, factor: float, threads: int, stored: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With few bytes a task and a read, so that there are many."""
    save(tmp_path / "adapter", 16, 16 * factor, stored, seed=1)
    targets, geometry = targets_of(CUTS[cut]), Geometry(3, 48, 2, by_output=True)
    file = read_adapter(tmp_path / "adapter", targets.targets, 64)
    reading = Reading(1, (Source(str(tmp_path / "adapter"), file.manifest, file=file.packed()),), file.manifest)
    take, preadv, found = DirectReads.take, os.preadv, []

    def counted(*args: object) -> bool:
        found.append(take(*args))  # type: ignore[arg-type]
        return found[-1]

    def few(fd: int, buffers: list[memoryview], offset: int) -> int:
        return preadv(fd, [buffers[0][:1001]], offset)

    monkeypatch.setattr(direct, "_BATCH", 6000)
    monkeypatch.setattr(direct, "ALONE", 1000)
    monkeypatch.setattr(os, "preadv", few)
    monkeypatch.setattr(DirectReads, "take", counted)
    with ThreadPoolExecutor(threads or 1) as helpers:
        reader = Reader(targets, geometry, torch.bfloat16, no_gains, helpers if threads else None)
        _, pages, _ = reader.read(reading)
    assert sum(found) == (2 if cut == "by inputs" else 4), "rows of 18 and of 12 inputs fill no tiles"
    monkeypatch.setattr(DirectReads, "take", lambda *_: False)
    expected = Reader(targets, geometry, torch.bfloat16, no_gains).read(reading)[1]
    assert torch.equal(pages, expected)


@pytest.mark.parametrize("cut", [cut for cut in CUTS if cut != "by inputs"])
@pytest.mark.parametrize("factor", [1.0, 2.0, 0.3])
@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float32], ids=str)
def test_any_range_of_pages_can_be_read_alone(
    cut: str, factor: float, stored: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Into memory that was in use."""
    monkeypatch.setitem(SIZES, "q_proj", (512, 136))  # B ends within a tile
    monkeypatch.setitem(SIZES, "o_proj", (256, 72))
    monkeypatch.setitem(SIZES, "lm_head", (256, 131))
    monkeypatch.setattr(direct, "_BATCH", 6000)
    save(tmp_path / "adapter", 16, 16 * factor, stored, seed=1)
    targets, geometry = targets_of(CUTS[cut]), Geometry(3, 512, 2, by_output=True)
    file = read_adapter(tmp_path / "adapter", targets.targets, 64)
    reading = Reading(1, (Source(str(tmp_path / "adapter"), file.manifest, file=file.packed()),), file.manifest)
    reader = Reader(targets, geometry, torch.bfloat16, no_gains)
    _, expected, _ = reader.read(reading)
    adapter = reader.open(reading)
    monkeypatch.setattr("octavo.features.lora.reader._cached", lambda path: True)
    assert adapter.in_memory
    rng = random.Random(1)
    for _ in range(20):
        first = rng.randrange(len(expected))
        pages = torch.full((rng.randint(1, len(expected) - first), geometry.block_bytes), 255, dtype=torch.uint8)
        adapter.fill(first, pages)
        assert torch.equal(pages, expected[first : first + len(pages)])


def test_a_file_that_ends_early_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path / "adapter", 16, 16, torch.bfloat16, seed=1)
    targets = targets_of(CUTS["whole"])
    file = read_adapter(tmp_path / "adapter", targets.targets, 64)
    reading = Reading(1, (Source(str(tmp_path / "adapter"), file.manifest, file=file.packed()),), file.manifest)
    reader = Reader(targets, Geometry(3, 48, 2, by_output=True), torch.bfloat16, no_gains)
    monkeypatch.setattr(Reader, "_checked", lambda *_: file)
    os.truncate(file.weights, file.weights.stat().st_size - 1000)
    with pytest.raises(ModelFileError, match=r"adapter_model\.safetensors changed while it was read"):
        reader.read(reading)


def test_matrices_of_gguf_files_are_read(tmp_path: Path) -> None:
    """Of an architecture whose rows llama.cpp leaves in order, and of sizes that fill whole tiles."""
    a, b = torch.randn(16, 256), torch.randn(128, 16)
    path = tmp_path / "adapter.gguf"
    writer = gguf.GGUFWriter(path, "qwen2")
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", 16.0)
    for role, matrix in (("a", a), ("b", b)):
        writer.add_tensor(f"blk.0.attn_q.weight.lora_{role}", matrix.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    target = Target("model.layers.0.self_attn", (TargetPart("q_proj", 256, 128, 256, 128),))
    targets = Targets((target,), (nn.Identity(),), ((Cut(),),), ((None,),))  # type: ignore[arg-type]
    found = InBlocks({path: 1.0}, targets, by_output=True, dtype=torch.bfloat16, slice_bytes=512)
    check(found.pair(0), (a.bfloat16(), b.bfloat16()), Cut(), 1.0, torch.bfloat16)


def test_adapters_that_are_alike_are_planned_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SIZES, "o_proj", (256, 72))
    monkeypatch.setitem(SIZES, "lm_head", (256, 131))
    targets, geometry = targets_of(CUTS["whole"]), Geometry(3, 512, 2, by_output=True)
    readings, expected = [], []
    for number in range(2):
        folder = tmp_path / str(number)
        save(folder, 16, 16, torch.bfloat16, seed=number)
        file = read_adapter(folder, targets.targets, 64)
        readings.append(Reading(1, (Source(str(folder), file.manifest, file=file.packed()),), file.manifest))
        expected.append(Reader(targets, geometry, torch.bfloat16, no_gains).read(readings[-1])[1])
    assert not torch.equal(*expected)
    reader = Reader(targets, geometry, torch.bfloat16, no_gains)
    assert torch.equal(reader.read(readings[0])[1], expected[0])
    (weighted,) = readings[1].sources
    halved = msgspec.structs.replace(readings[1], sources=(msgspec.structs.replace(weighted, weight=0.5),))
    assert not torch.equal(reader.read(halved)[1], expected[1])
    monkeypatch.setattr(DirectReads, "take", None)
    assert torch.equal(reader.read(readings[1])[1], expected[1])
    (tmp_path / "1" / "adapter_model.safetensors").unlink()
    monkeypatch.setattr(Reader, "_checked", lambda _, source: unpacked(source.file))
    with pytest.raises(ModelFileError, match=r"/1/adapter_model\.safetensors can't be read"):
        reader.read(readings[1])


@pytest.mark.parametrize("ranks", [(1,), (12,), (4, 7)], ids=str)
def test_padding_of_b_is_zero(ranks: tuple[int, ...], tmp_path: Path) -> None:
    """Kernels may read whole strides."""
    folders = {tmp_path / str(i): 2.0 for i in range(len(ranks))}
    for i, folder in enumerate(folders):
        save(folder, ranks[i], ranks[i], torch.bfloat16, seed=i)
    found = InBlocks(folders, targets_of(CUTS["whole"]), by_output=True, dtype=torch.bfloat16, slice_bytes=512)
    placed: Layout = found.layout
    for target, part in enumerate(found.parts):
        span = placed.spans[target, 0]
        stride = found.geometry.stride(span.rank)
        assert stride % 8 == 0
        assert stride - 8 < span.rank == sum(ranks) <= stride
        elements = found.geometry.row_tiles(part.outputs * stride) * 256
        row = found.weights.rows(0, span.b, 1, elements)[0]
        b = row[: part.outputs * stride].view(part.outputs, stride)
        assert b[:, : span.rank].count_nonzero() > b[:, : span.rank].numel() / 2
        assert not b[:, span.rank :].any()
        assert not row[part.outputs * stride :].any()


@FORMS
def test_adapters_for_kernels_have_both_forms(by_output: bool) -> None:
    sizes, ranks = [70, 130], [[4, 0], [20, 8]]
    made = World(200, sizes, ranks, dtype=torch.float32, device=torch.device("cpu"), seed=1, by_output=by_output)
    weights = Weights(SimpleNamespace(memory=made.pool.view(torch.uint8)), made.tables, torch.float32, HOST)  # type: ignore[arg-type]
    for adapter, own in enumerate(made.factors):
        for part, factors in enumerate(own):
            if factors is not None:
                span = made.tables.layouts[adapter].spans[made.index, part]
                assert torch.equal(weights.rows(adapter, span.a, span.rank, 200), factors[0])
                assert torch.equal(weights.b(adapter, span, sizes[part]).t(), factors[1])
