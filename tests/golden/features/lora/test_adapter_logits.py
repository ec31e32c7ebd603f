"""Logits with adapters equal those of the model with merged weights, for all families, in torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_kit import BASE, FORMS, load
from safetensors.torch import load_file
from tiny import FAMILIES, make_checkpoint, model_files, reference_of
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
    # An adapter of the embedding does not change a head that shares its table.
    weights.setdefault("lm_head.weight", weights["model.embed_tokens.weight"])
    tied = bool(theirs.config.tie_word_embeddings)
    changed = weights if adapter is None else merged(weights, adapter, tied=tied)
    theirs.load_state_dict(changed, strict=False)
    found = expected(theirs, tokens)
    theirs.load_state_dict(weights, strict=False)
    return found


def prompts_of(count: int, vocab_size: int = 200) -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    lengths = torch.randint(1, 30, (count,), generator=generator).tolist()
    return [torch.randint(1, vocab_size - 1, (n,), generator=generator).tolist() for n in lengths]


@pytest.mark.parametrize("family", FAMILIES)
def test_twelve_adapters_in_one_batch(family: str, tmp_path: Path) -> None:
    """Ranks mixed with each other and with rows of the base, chunks with single tokens."""
    theirs = make_checkpoint(family, tmp_path)
    adapted = load(model_files(tmp_path), ReferenceAttention(), num_blocks=7000, seed=3)
    config = theirs.config.to_dict()
    adapters = [save_adapter(tmp_path / f"adapter{i}", config, seed=i, rank=RANKS[i % len(RANKS)]) for i in range(12)]
    entries = [adapted.enter(adapter).entries[0] for adapter in adapters]
    chosen: list[Path | None] = [*adapters, None, adapters[3], None]
    prompts = prompts_of(len(chosen), config["vocab_size"])
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


TOKENS = list(range(180, 20, -2))
KINDS: dict[str, dict[str, Any]] = {
    "rank-stabilised": {"use_rslora": True, "rank": 12},
    "patterns": {"rank_pattern": {"q_proj": 3, "down_proj": 24}, "alpha_pattern": {"v_proj": 5.0}},
    "attention only": {"targets": ("q_proj", "v_proj"), "alpha": 3},
    "magnitudes": {"use_dora": True},
    "embedding": {"targets": ("embed_tokens", "o_proj")},
    "head": {"targets": ("lm_head",)},
    "magnitudes of a head": {"targets": ("lm_head", "k_proj"), "use_dora": True},
    "tokens of the embedding": {"targets": ("up_proj",), "trainable_token_indices": TOKENS},
    "tokens of both": {"targets": ("up_proj",), "trainable_token_indices": {"embed_tokens": TOKENS, "lm_head": TOKENS}},
    "other tokens of a head": {
        "targets": ("up_proj",),
        "trainable_token_indices": {"embed_tokens": TOKENS, "lm_head": [9, 5, 0]},
    },
    "tokens of a head": {"targets": ("up_proj",), "trainable_token_indices": {"lm_head": [150, 2]}},
    "saved modules": {"targets": ("up_proj",), "modules_to_save": ["embed_tokens", "lm_head"]},
}


@pytest.fixture(scope="module", params=["llama-biases", "smollm"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """A model with biases and a head of its own, and one whose head is the embedding's table."""
    folder = tmp_path_factory.mktemp(request.param)
    theirs = make_checkpoint(request.param, folder)
    theirs.lm_head.weight = torch.nn.Parameter(theirs.lm_head.weight.detach().clone())
    return theirs, folder


@FORMS
@pytest.mark.parametrize("kind", KINDS)
def test_kinds_of_adapters(kind: str, by_output: bool, pair: tuple[Any, Path], tmp_path: Path) -> None:
    """In a batch with the base, where late layers compute the rows that get logits only."""
    theirs, folder = pair
    adapted = load(model_files(folder), ReferenceAttention(), by_output=by_output)
    adapter = save_adapter(tmp_path, theirs.config.to_dict(), seed=1, **KINDS[kind])
    payload = adapted.enter(adapter)
    prompts = prompts_of(3)
    rows = [adapted.runner.row(prompt, len(prompt)) for prompt in prompts]
    found = adapted.step(
        rows, [len(prompt) for prompt in prompts], LoraStep(payload.entries, [0, -1, 0], payload.general)
    )
    expected = torch.stack(
        [with_merged(theirs, folder, adapter if i != 1 else None, p)[-1] for i, p in enumerate(prompts)]
    )
    torch.testing.assert_close(found, expected, **TOLERANCE)
    assert not torch.allclose(expected[0], with_merged(theirs, folder, None, prompts[0])[-1], atol=1e-2)


@pytest.mark.parametrize("kind", ["embedding", "tokens of the embedding", "saved modules"])
@pytest.mark.parametrize("family", ["gemma3", "granite"])
def test_embeddings_that_the_model_scales(family: str, kind: str, tmp_path: Path) -> None:
    """What an adapter changes in the table is scaled as the table's rows are."""
    theirs = make_checkpoint(family, tmp_path)
    theirs.lm_head.weight = torch.nn.Parameter(theirs.lm_head.weight.detach().clone())
    files = model_files(tmp_path)
    adapted = load(files, reference_of(files))
    assert adapted.model.embedding_multiplier != 1
    adapter = save_adapter(tmp_path / "adapter", theirs.config.to_dict(), seed=1, **KINDS[kind])
    payload, prompt = adapted.enter(adapter), prompts_of(3)[2]
    row = adapted.runner.row(prompt, len(prompt))
    found = adapted.step([row], [len(prompt)], LoraStep(payload.entries, [0], payload.general))
    torch.testing.assert_close(found[0], with_merged(theirs, tmp_path, adapter, prompt)[-1], **TOLERANCE)


def test_learned_positions_take_no_adapters(tmp_path: Path) -> None:
    """Their rows are those of positions, and an adapter of an embedding looks up token ids."""
    make_checkpoint("gpt2", tmp_path)
    targets = load(model_files(tmp_path), ReferenceAttention()).worker._targets.targets
    assert [target.stored(0).name for target in targets if target.embedding] == ["transformer.wte"]


@FORMS
def test_a_weighted_sum_of_adapters(by_output: bool, pair: tuple[Any, Path], tmp_path: Path) -> None:
    theirs, folder = pair
    adapted = load(model_files(folder), ReferenceAttention(), by_output=by_output)
    config = theirs.config.to_dict()
    first = save_adapter(tmp_path / "first", config, seed=1, rank=4)
    second = save_adapter(tmp_path / "second", config, seed=2, rank=9, targets=("v_proj", "gate_proj"))
    payload = adapted.enter(first, second, weights=[0.5, -1.25])
    prompt = prompts_of(1)[0]
    found = adapted.step([adapted.runner.row(prompt, len(prompt))], [len(prompt)], LoraStep(payload.entries, [0]))
    weights = load_file(folder / "model.safetensors")
    theirs.load_state_dict(merged(merged(weights, first, 0.5), second, -1.25), strict=False)
    torch.testing.assert_close(found[0], expected(theirs, prompt)[-1], **TOLERANCE)
    theirs.load_state_dict(weights, strict=False)


def test_an_adapter_is_usable_after_a_new_cache_was_attached(pair: tuple[Any, Path], tmp_path: Path) -> None:
    """As after sleep; the model is wrapped once."""
    theirs, folder = pair
    adapted = load(model_files(folder), ReferenceAttention())
    adapter = save_adapter(tmp_path, theirs.config.to_dict(), seed=1, targets=("embed_tokens", "down_proj"))
    prompt = prompts_of(1)[0]
    for _ in range(2):
        payload = adapted.enter(adapter)
        row = adapted.runner.row(prompt, len(prompt))
        found = adapted.step([row], [len(prompt)], LoraStep(payload.entries, [0], payload.general))
        torch.testing.assert_close(found[0], with_merged(theirs, folder, adapter, prompt)[-1], **TOLERANCE)
        adapted.attach()


def test_prompts_logits_are_those_of_their_rows_adapter(pair: tuple[Any, Path], tmp_path: Path) -> None:
    """A head's adapter also changes the logits of a prompt, which are computed for one row of the step at a time."""
    theirs, folder = pair
    adapted = load(model_files(folder), ReferenceAttention())
    adapter = save_adapter(tmp_path, theirs.config.to_dict(), seed=1, targets=("lm_head",))
    entries = adapted.enter(adapter).entries
    prompt = prompts_of(1)[0]
    rows = [adapted.runner.row(prompt, len(prompt)) for _ in range(2)]
    adapted.step(rows, [len(prompt)] * 2, LoraStep(entries, [-1, 0]))
    whole = adapted.runner.input([adapted.runner.row(prompt, len(prompt))], [len(prompt)], all_logits=True)
    adapted.worker.select("lora")
    try:
        with torch.inference_mode():
            hidden = adapted.model.forward(adapted.model.embed(whole), whole)
            for row, changed in ((1, adapter), (0, None)):
                adapted.worker.only_row(row, len(hidden))
                found = adapted.model.logits(hidden).clone()
                torch.testing.assert_close(found, with_merged(theirs, folder, changed, prompt), **TOLERANCE)
            adapted.worker.only_row(None)
            ends = adapted.model.logits(hidden[[-1, -1]])
    finally:
        adapted.worker.select(None)
    for found, changed in zip(ends, (None, adapter), strict=True):
        torch.testing.assert_close(found, with_merged(theirs, folder, changed, prompt)[-1], **TOLERANCE)


@pytest.mark.parametrize("use_dora", [False, True], ids=["additions", "magnitudes"])
@pytest.mark.parametrize("family", ["cohere", "ernie"])
def test_channels_that_are_reordered_at_load(family: str, use_dora: bool, tmp_path: Path) -> None:
    """Such models rotate neighbouring channels of queries and keys; Octavo's kernels rotate halves."""
    theirs = make_checkpoint(family, tmp_path)
    adapted = load(model_files(tmp_path), ReferenceAttention())
    assert adapted.model.spec.rope_of(0).order is not None
    adapter = save_adapter(tmp_path / "adapter", theirs.config.to_dict(), seed=1, use_dora=use_dora)
    payload = adapted.enter(adapter)
    prompt = prompts_of(3)[2]
    row = adapted.runner.row(prompt, len(prompt))
    found = adapted.step([row], [len(prompt)], LoraStep(payload.entries, [0], payload.general))
    torch.testing.assert_close(found[0], with_merged(theirs, tmp_path, adapter, prompt)[-1], **TOLERANCE)
