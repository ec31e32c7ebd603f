"""Which steps with adapters a GPU computes by kernels, and records."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest
import torch
from torch import nn

from octavo.core.plan import StepPlan
from octavo.device.transfer import link_of
from octavo.features.lora.layout import Geometry, Manifest, Piece, Target, TargetPart, layout
from octavo.features.lora.payload import AdapterEntry, LoraStep
from octavo.features.lora.tables import RANKS, Batch, Tables
from octavo.features.lora.targets import Targets, _of_experts
from octavo.features.lora.worker import EXPERTS, GENERAL, LOW_RANK, LoraWorker
from octavo.nn.experts import ExpertLayer
from octavo.nn.experts_spec import ExpertsForm
from octavo.worker.hooks import Site

HOST = link_of(torch.device("cpu"))
GEOMETRY = Geometry(4, 4096, 2, by_output=True)
TARGETS = (Target("up", (TargetPart("", 64, 128, 64, 128),)), Target("head", (TargetPart("", 64, 101, 64, 101),)))


def worker(max_rank: int, *, resident: bool = True, mixture: ExpertLayer | None = None) -> LoraWorker:
    """Return the worker half for these targets; adapters 0 and 1 change one of them each, 2 changes both.

    Args:
        mixture: with one expert, whose products are two more targets; adapter 3 changes the second one.
    """
    made = LoraWorker(4, max_rank)
    made._site = cast(Site, SimpleNamespace(device=SimpleNamespace(resident=resident)))
    targets: tuple[Target, ...] = TARGETS
    layers: list[nn.Module] = [nn.Identity(), nn.Identity()]
    if mixture is not None:
        targets += tuple(one for one, _ in _of_experts(mixture, late=False))
        layers += [mixture, mixture]
    made._targets = cast(Targets, SimpleNamespace(targets=targets, layers=layers))
    made._geometry = GEOMETRY
    made._tables = Tables(targets, GEOMETRY, 4, 100, HOST)
    made._batch = Batch(8, 4, HOST, -(-max_rank // RANKS))
    if resident:
        made._unserved = made._without_kernels()
    entries = []
    for index, changed in enumerate(((0,), (1,), (0, 1), *([(len(targets) - 1,)] if mixture is not None else []))):
        placed = layout(targets, Manifest(tuple(Piece(target, 0, rank=4) for target in changed)), GEOMETRY)
        made._layouts[index] = placed
        entries.append(AdapterEntry(index, index, list(range(placed.num_blocks))))
    made.lay_out(cast(StepPlan, None), LoraStep(entries))
    return made


def variant(made: LoraWorker, rows: list[int], *, general: bool = False, experts: bool = False) -> object:
    step = LoraStep(rows=rows, general=general, experts=experts)
    ones = {"num_tokens": [1] * len(rows), "samples": [True] * len(rows), "num_drafts": [0] * len(rows)}
    made.lay_out(cast(StepPlan, SimpleNamespace(**ones)), step)
    return made.variant(step)


def test_only_adapters_of_odd_layers_are_computed_in_torch() -> None:
    made = worker(16)
    assert made._unserved == {1}
    assert variant(made, [0, -1, 0]) == LOW_RANK
    assert variant(made, [0, 1]) == GENERAL
    assert variant(made, [2]) == GENERAL
    assert variant(made, [0, -1]) == LOW_RANK
    assert variant(made, [0], general=True) == GENERAL
    made._layouts[7] = made._layouts[0]
    made.lay_out(cast(StepPlan, None), LoraStep([AdapterEntry(1, 7, list(range(20)))]))
    assert variant(made, [0, 1]) == LOW_RANK, "another adapter has the index"
    assert made.variant(None) is None
    assert made.variants() == [LOW_RANK]


def test_ranks_that_fill_more_than_a_tile_are_computed_in_torch() -> None:
    assert worker(256)._unserved == {1}
    assert worker(257)._unserved == {0, 1}


@pytest.mark.parametrize(("size", "expected"), [(64, EXPERTS), (60, GENERAL)])
def test_adapters_of_experts_are_computed_by_kernels_or_in_torch(size: int, expected: str) -> None:
    """60 is no multiple of 8."""
    pytest.importorskip("triton")
    from octavo.nn.quant.gpu_experts import StackedExperts

    cpu, form = torch.device("cpu"), ExpertsForm(num_experts=1, hidden_size=32, size=size)
    mixture = ExpertLayer("experts", cpu, form, size, StackedExperts(form, torch.bfloat16, cpu))
    made = worker(16, mixture=mixture)
    assert made._unserved == ({1} if expected == EXPERTS else {1, 2, 3})
    assert variant(made, [3, -1], experts=True) == expected
    assert variant(made, [0, -1]) == LOW_RANK
    assert variant(made, [1, 3], experts=True) == GENERAL


def test_a_cpu_has_one_variant_of_low_rank_additions() -> None:
    assert variant(worker(16, resident=False), [0, 1]) == LOW_RANK
