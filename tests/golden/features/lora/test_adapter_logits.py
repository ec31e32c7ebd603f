"""Logits with adapters equal those of the model with merged weights, for all families, in torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_kit import BASE, load
from safetensors.torch import load_file
from tiny import FAMILIES, make_checkpoint, model_files
from tiny_adapters import merged, save_adapter
from torch import Tensor

from octavo.features.lora.payload import LoraStep
from octavo.nn.attention.reference import ReferenceAttention

RANKS = (4, 8, 16, 64)
TOLERANCE = {"rtol": 1e-4, "atol": 1e-4}


def expected(theirs: Any, tokens: list[int]) -> Tensor:
    with torch.no_grad():
        return theirs(torch.tensor([tokens]), use_cache=False).logits[0]


def with_merged(theirs: Any, folder: Path, adapter: Path | None, tokens: list[int]) -> Tensor:
    """The logits of Transformers' model with the adapter's weights merged in."""
    weights = load_file(folder / "model.safetensors")
    changed = weights if adapter is None else merged(weights, adapter)
    theirs.load_state_dict(changed, strict=False)
    found = expected(theirs, tokens)
    theirs.load_state_dict(weights, strict=False)
    return found


def prompts_of(count: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    lengths = torch.randint(1, 30, (count,), generator=generator).tolist()
    return [torch.randint(1, 199, (n,), generator=generator).tolist() for n in lengths]


@pytest.mark.parametrize("family", FAMILIES)
def test_twelve_adapters_in_one_batch(family: str, tmp_path: Path) -> None:
    """Ranks mixed with each other and with rows of the base, chunks with single tokens."""
    theirs = make_checkpoint(family, tmp_path)
    adapted = load(model_files(tmp_path), ReferenceAttention(), num_blocks=2400, seed=3)
    config = theirs.config.to_dict()
    adapters = [save_adapter(tmp_path / f"adapter{i}", config, seed=i, rank=RANKS[i % len(RANKS)]) for i in range(12)]
    entries = [adapted.enter(adapter).entries[0] for adapter in adapters]
    chosen: list[Path | None] = [*adapters, None, adapters[3], None]
    prompts = prompts_of(len(chosen))
    assigned = [BASE if one is None else adapted.indices[one] for one in chosen]
    rows = [adapted.runner.row(prompt, len(prompt)) for prompt in prompts]
    strides = [(1, 6, 13)[i % 3] for i in range(len(rows))]
    found: list[list[Tensor]] = [[] for _ in rows]
    while any(row.computed < len(row.tokens) for row in rows):
        active = [i for i, row in enumerate(rows) if row.computed < len(row.tokens)]
        counts = [min(strides[i], len(rows[i].tokens) - rows[i].computed) for i in active]
        payload = LoraStep(entries, [assigned[i] for i in active])
        entries = []
        logits = adapted.step([rows[i] for i in active], counts, payload, all_logits=True)
        for i, part in zip(active, logits.split(counts), strict=True):
            found[i].append(part)
    for parts, adapter, prompt in zip(found, chosen, prompts, strict=True):
        torch.testing.assert_close(torch.cat(parts), with_merged(theirs, tmp_path, adapter, prompt), **TOLERANCE)
