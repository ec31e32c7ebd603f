"""Under tensor parallelism each rank keeps its slices of an adapter: outputs where it has outputs, inputs likewise."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch
from adapter_kit import FORMS, Adapted
from tiny import load_model, make_checkpoint, model_files
from tiny_adapters import EVERY, save_adapter
from torch import Tensor

from octavo.features.lora.delta import Weights
from octavo.features.lora.payload import RankTargets
from octavo.nn.attention.reference import ReferenceAttention
from octavo.parallel.mesh import Mesh

Rows = dict[tuple[str, str], Tensor]


def rows_of(folder: Path, adapter: Path, mesh: Mesh, by_output: bool) -> Rows:
    """Return the rows that a rank has in its blocks: (projection, kind) -> [rows, own features]."""
    files = model_files(folder)
    adapted = Adapted(load_model(files, ReferenceAttention(), mesh=mesh), files, by_output=by_output)
    told = msgspec.convert(adapted.worker.call("targets", {}), RankTargets)
    assert told.share.geometry == adapted.worker._geometry, "both halves count the same blocks"
    entry = adapted.enter(adapter).entries[0]
    tables, targets = adapted.worker._tables, adapted.worker._targets.targets
    placed = adapted.worker._layouts[entry.uid]
    tables.enter(entry.index, entry.blocks, placed)
    weights = Weights(adapted.blocks, tables, torch.float32, adapted.worker._site.device)
    found: Rows = {}
    for (i, j), span in placed.spans.items():
        name, part = targets[i].name(j), targets[i].parts[j]
        found[name, "a"] = weights.rows(0, span.a, span.rank, part.own_inputs)
        found[name, "b"] = weights.b(0, span, part.own_outputs)
        found[name, "gain"] = weights.gain(0, span.gain, part.own_outputs)[None]
    return found


@FORMS
@pytest.mark.parametrize("family", ["llama", "qwen3-biases"])
def test_ranks_have_slices_of_the_whole(family: str, by_output: bool, tmp_path: Path) -> None:
    """The second family has one kv head, which both ranks keep."""
    config = make_checkpoint(family, tmp_path).config.to_dict()
    targets = (*EVERY, "lm_head")
    adapter = save_adapter(tmp_path / "adapter", config, seed=1, rank=5, targets=targets, use_dora=True)
    whole = rows_of(tmp_path, adapter, Mesh(), by_output)
    halves = [rows_of(tmp_path, adapter, Mesh(rank, 2), by_output) for rank in range(2)]
    for (name, kind), rows in whole.items():
        mine = [half[name, kind] for half in halves]
        by_inputs = name.endswith(("o_proj", "down_proj"))
        kept = name.endswith("lm_head") or (config["num_key_value_heads"] == 1 and name.endswith(("k_proj", "v_proj")))
        if kept or (kind == "a") != by_inputs:
            for half in mine:
                torch.testing.assert_close(half, rows, rtol=1e-5, atol=1e-6)
        else:
            torch.testing.assert_close(torch.cat(mine, dim=1), rows, rtol=1e-5, atol=1e-6)
