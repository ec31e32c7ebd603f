"""A model divided over two processes computes what it computes alone, and each process reads its own part only."""

from __future__ import annotations

import datetime
import threading
import traceback
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed
import torch.multiprocessing
from paged import PagedRunner
from rank_kit import ThreadCollectives
from safetensors import safe_open
from test_quantized_golden import quantize
from tiny import load_model, make_checkpoint, model_files, reference_of
from tiny_families import DENSE, HYBRID, HYBRID_MOE, MOE

from octavo.core.errors import ConfigError
from octavo.models.load.safetensors import SafetensorsCheckpoint
from octavo.models.registry import build_model, spec_of
from octavo.nn.attention.reference import ReferenceAttention
from octavo.nn.quant.base import Part
from octavo.nn.shard import COL, NONE, ROW, Cut, Heads, Run, Runs, cut
from octavo.nn.weights import TensorSpec
from octavo.parallel.collectives import TorchCollectives
from octavo.parallel.mesh import Mesh

FAMILIES = (
    "llama",
    "llama-biases",
    "qwen2",
    "qwen3-biases",
    "mistral",
    "youtu",
    "youtu-direct",
    "qwen2-moe",
    "gpt-oss",
    "llama4",
)
"""An untied head, biases on both sides of a sum, a tied head, one kv head for two ranks, a window, the same latents on
both ranks, with queries of low rank and without, experts that are divided, sinks, biases of experts."""
JOINT_HEADS = ("bloom", "cohere", "olmo2", "olmo3", "olmoe")
"""Biases by distance, whose slopes depend on the head; norms with weights by head; norms over all heads together."""
EVERY = (*DENSE, *HYBRID, *HYBRID_MOE, *MOE)
ODD_WIDTHS = ("gemma",)
"""Families whose tiny checkpoint can't be divided by two."""
PROMPTS = [[5, 9, 33, 7, 120], [64, 2]]


def logits_of(folder: Path, mesh: Mesh) -> torch.Tensor:
    """Of two prompts and the next token of each, computed together."""
    files = model_files(folder)
    runner = PagedRunner(load_model(files, reference_of(files), mesh=mesh), 20, 4)
    rows = [runner.row(prompt, len(prompt) + 1) for prompt in PROMPTS]
    first = runner.step(rows, [len(prompt) for prompt in PROMPTS])
    for row in rows:
        row.tokens.append(11)
    return torch.cat([first, runner.step(rows, [1, 1])])


def run_rank(rank: int, folder: str) -> None:
    root = Path(folder)
    try:
        torch.set_num_threads(1)
        torch.distributed.init_process_group(
            "gloo",
            init_method=f"file://{root / 'rendezvous'}",
            rank=rank,
            world_size=2,
            timeout=datetime.timedelta(seconds=120),
        )
        for family in FAMILIES:
            torch.save(logits_of(root / family, Mesh(rank, 2, TorchCollectives())), root / f"{family}.{rank}.pt")
        torch.distributed.destroy_process_group()
    except BaseException:
        (root / f"error.{rank}").write_text(traceback.format_exc())
        raise


@pytest.mark.slow
def test_two_processes_compute_what_one_does(tmp_path: Path) -> None:
    for family in FAMILIES:
        make_checkpoint(family, tmp_path / family)
    torch.multiprocessing.spawn(run_rank, args=(str(tmp_path),), nprocs=2)
    for family in FAMILIES:
        alone = logits_of(tmp_path / family, Mesh())
        for rank in range(2):
            torch.testing.assert_close(torch.load(tmp_path / f"{family}.{rank}.pt"), alone, rtol=1e-4, atol=1e-4)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Products of torch in threads side by side divide their sums by chance, which changes their last bits."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("family", JOINT_HEADS)
def test_heads_that_are_not_alike(family: str, tmp_path: Path) -> None:
    check_division(family, 2, tmp_path)


@pytest.mark.usefixtures("one_thread")
def test_more_ranks_than_kv_heads_whose_norm_is_over_all(tmp_path: Path) -> None:
    check_division("olmo2", 4, tmp_path)


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("family", [name for name in EVERY if name not in (*JOINT_HEADS, *ODD_WIDTHS)])
def test_every_family(family: str, tmp_path: Path) -> None:
    check_division(family, 2, tmp_path)


def check_division(family: str, size: int, folder: Path) -> None:
    """Ranks in threads compute what one device does, the same bits on each."""
    make_checkpoint(family, folder)
    barrier, given = threading.Barrier(size), [torch.empty(0)] * size
    meshes = [Mesh(rank, size, ThreadCollectives(rank, barrier, given)) for rank in range(size)]
    with ThreadPoolExecutor(size) as threads:
        first, *others = threads.map(logits_of, [folder] * size, meshes)
    torch.testing.assert_close(first, logits_of(folder, Mesh()), rtol=1e-4, atol=1e-4)
    assert all(torch.equal(first, other) for other in others)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_rank_asks_for_its_part_only(family: str, tmp_path: Path) -> None:
    make_checkpoint(family, tmp_path)
    files = model_files(tmp_path)
    whole = load_model(files, reference_of(files))
    parts = [load_model(files, reference_of(files), mesh=Mesh(rank, 2)) for rank in range(2)]
    for name, layer in whole.named_modules():
        own = [dict(part.named_modules())[name] for part in parts]
        if name.endswith("mlp.gate_up"):
            halves = [one.scheme.weight for one in own]
            gates, ups = zip(*(half.chunk(2) for half in halves), strict=True)
            assert torch.equal(torch.cat([*gates, *ups]), layer.scheme.weight)
        if name.endswith((".mlp.out", ".mixer.out")):
            assert torch.equal(torch.cat([one.scheme.weight for one in own], dim=1), layer.scheme.weight)
        if name.endswith(".expansion"):
            assert torch.equal(torch.cat([one.weight for one in own]), layer.weight)


def test_heads_go_to_ranks_whole_and_few_kv_heads_to_several() -> None:
    heads = Heads(8, 2, 16)
    assert [cut(heads, 0, 128, 64, Mesh(rank, 4)).outputs for rank in range(4)] == [
        (range(32),),
        (range(32, 64),),
        (range(64, 96),),
        (range(96, 128),),
    ]
    assert [cut(heads, 1, 32, 64, Mesh(rank, 4)).outputs for rank in range(4)] == [
        (range(16),),
        (range(16),),
        (range(16, 32),),
        (range(16, 32),),
    ]


def test_packed_tensors_are_cut_where_elements_end() -> None:
    packed = TensorSpec((8, 96), torch.int32, out_dim=1, in_dim=0)  # 8 inputs in one element, as GPTQ stores them
    assert Cut(inputs=range(32, 64)).index(packed, 96, 64) == (slice(4, 8), slice(None))
    assert Cut(outputs=(range(48, 96),)).index(packed, 96, 64) == (slice(None), slice(48, 96))
    with pytest.raises(ConfigError, match="packed in 8 elements can't be cut at feature 36"):
        Cut(inputs=range(36, 64)).index(packed, 96, 64)


@pytest.mark.parametrize(("shard", "size"), [(COL, 3), (ROW, 5)])
def test_features_that_do_not_divide_are_refused(shard: Any, size: int) -> None:
    part = Part("up_proj", 64, 112)
    with pytest.raises(ConfigError, match=f"can't be divided over {size} devices"):
        cut(shard, 0, part.out_features, part.in_features, Mesh(0, size))
    assert cut(NONE, 0, part.out_features, part.in_features, Mesh(1, size)) == Cut()


def test_heads_that_do_not_divide_are_refused(tmp_path: Path) -> None:
    make_checkpoint("smollm", tmp_path)
    spec = spec_of(model_files(tmp_path).config)
    with pytest.raises(ConfigError, match=r"over 2 devices. Of other numbers, the heads allow 1, 3, 9\."):
        build_model(
            spec,
            dtype=torch.float32,
            device=torch.device("cpu"),
            attention=ReferenceAttention(),
            mesh=Mesh(0, 2),
        )


def test_each_kind_of_outputs_is_divided_by_its_own_units() -> None:
    """Two heads of 8, one group of 4 numbers that all heads share, two rates."""
    runs = Runs(((Run(2, 8), Run(1, 4), Run(2)),))
    matrix = torch.arange(22)[:, None]
    kept = [cut(runs, 0, 22, 64, Mesh(rank, 2)) for rank in range(2)]
    assert kept[1].outputs == (range(8, 16), range(16, 20), range(21, 22))
    assert [one.rows_of(matrix).flatten().tolist() for one in kept] == [
        [*range(8), *range(16, 20), 20],
        [*range(8, 16), *range(16, 20), 21],
    ]
    with pytest.raises(ConfigError, match="3 heads or groups can't be divided over 2 devices"):
        cut(Runs(((Run(3, 8),),)), 0, 24, 64, Mesh(0, 2))


@pytest.mark.parametrize(("family", "method"), [("llama", ""), ("qwen2-moe", ""), ("quantized", "gptq-4-asymmetric")])
def test_ranks_together_read_each_divided_tensor_once(
    family: str, method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytes are counted. What is small is read by both: norms, routers and, in GPTQ, numbers of groups."""
    theirs = make_checkpoint(family, tmp_path)
    if method:
        quantize(tmp_path, theirs, method)
    files = model_files(tmp_path)
    count: Counter[str] = Counter()
    read = SafetensorsCheckpoint.tensor

    def counted(source: SafetensorsCheckpoint, name: str, spec: TensorSpec, index: Any = None) -> torch.Tensor:
        found = read(source, name, spec, index)
        count[name] += found.nbytes
        return found

    monkeypatch.setattr(SafetensorsCheckpoint, "tensor", counted)
    for rank in range(2):
        load_model(files, reference_of(files), mesh=Mesh(rank, 2))
    with safe_open(files.weights[0], "pt") as file:
        stored = {name: file.get_tensor(name).nbytes for name in file.keys()}  # noqa: SIM118 - not a mapping
    divided = [name for name in stored if "_proj." in name and not name.endswith(("g_idx", "o_proj.bias"))]
    assert len(divided) > 10
    assert {name: count[name] for name in divided} == {name: stored[name] for name in divided}
