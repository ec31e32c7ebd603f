"""Native programs of families unlike Llama: a token's logits are the same bits alone, in a batch and in chunks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from paged import PagedRunner
from tiny import load_model, make_checkpoint, model_files
from torch import Tensor

from octavo.models.model import compiled
from octavo.models.native import NativeDecoder
from octavo.native.program import Pool
from octavo.nn.attention.native import NativeAttention
from octavo.nn.experts import ExpertLayer
from octavo.nn.latent.native import NativeLatents
from octavo.nn.quant.experts import SeparateExperts

LENGTHS = (7, 90, 1, 33)
STRIDES = (3, 41, 1, 16)
ATTENDING = ("bloom", "gptj", "gemma", "gemma4-small", "olmo2", "gpt-oss", "qwen2-moe", "youtu")
RECURRENT = ("lfm2", "mamba2", "nemotron-h-moe", "qwen3-next", "jamba")


def native_runner(folder: Path, dtype: torch.dtype) -> PagedRunner:
    latent = "kv_lora_rank" in model_files(folder).config
    backend = NativeLatents(Pool(2)) if latent else NativeAttention(Pool(2))
    model = compiled(load_model(model_files(folder), backend, dtype), backend)
    assert isinstance(model, NativeDecoder)
    return PagedRunner(model, num_blocks=40, block_size=16, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", [*ATTENDING, *RECURRENT])
def test_logits_do_not_depend_on_the_batch_nor_on_chunks(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    make_checkpoint(family, tmp_path)
    runner = native_runner(tmp_path, dtype)
    generator = torch.Generator().manual_seed(5)
    prompts = [torch.randint(1, 199, (n,), generator=generator).tolist() for n in LENGTHS]
    alone = [runner.step([runner.row(prompt, len(prompt))], [len(prompt)], all_logits=True) for prompt in prompts]
    together = [runner.row(prompt, len(prompt)) for prompt in prompts]
    whole = runner.step(together, list(LENGTHS), all_logits=True)
    assert torch.equal(whole, torch.cat(alone))
    rows = [runner.row(prompt, len(prompt)) for prompt in prompts]
    found: list[list[Tensor]] = [[] for _ in rows]
    while active := [i for i, row in enumerate(rows) if row.computed < len(row.tokens)]:
        counts = [min(STRIDES[i], len(rows[i].tokens) - rows[i].computed) for i in active]
        logits = runner.step([rows[i] for i in active], counts, all_logits=True)
        for i, part in zip(active, logits.split(counts), strict=True):
            found[i].append(part)
    assert torch.equal(torch.cat([torch.cat(parts) for parts in found]), whole)


@pytest.mark.parametrize("family", ["gemma", "bloom", "nemotron", "minicpm3", *RECURRENT])
def test_bfloat16_stays_near_float32(family: str, tmp_path: Path) -> None:
    """With a gated feed-forward of odd size, too, whose rows end within a word."""
    theirs = make_checkpoint(family, tmp_path)
    runner = native_runner(tmp_path, torch.bfloat16)
    prompt = torch.randint(1, 199, (40,), generator=torch.Generator().manual_seed(6)).tolist()
    logits = runner.step([runner.row(prompt, 40)], [40], all_logits=True)
    with torch.no_grad():
        expected = theirs(torch.tensor([prompt]), use_cache=False).logits[0]
    assert torch.cosine_similarity(logits, expected, dim=-1).min() > 0.99


def test_experts_are_replaced_by_those_of_other_weights_and_kept_once(tmp_path: Path) -> None:
    make_checkpoint("qwen2-moe", tmp_path)
    prompt = list(range(1, 20))
    first, second = (native_runner(tmp_path, torch.float32) for _ in range(2))
    assert isinstance(second.model, NativeDecoder)
    experts = [layer for layer in second.model.source.modules() if isinstance(layer, ExpertLayer)]
    for layer in experts:
        assert isinstance(layer.scheme, SeparateExperts)
        assert all(one.nbytes == 0 for one in (*layer.scheme.gate_ups, *layer.scheme.downs))
        for matrix in layer.packed.reduce:
            matrix.weight.neg_()
    found = [runner.step([runner.row(prompt, 30)], [len(prompt)]) for runner in (first, second)]
    assert not torch.allclose(*found, atol=1e-2)
    assert isinstance(first.model, NativeDecoder)
    first.model.adopt(second.model)
    assert torch.equal(first.step([first.row(prompt, 30)], [len(prompt)]), found[1])


@pytest.mark.parametrize("kinds", [["linear_attention", "mlp"], ["mlp", "linear_attention"], ["full_attention", "moe"]])
def test_chosen_tokens_of_layers_of_one_part(kinds: list[str], tmp_path: Path) -> None:
    """A last layer without a mixer or without a feed-forward computes only the tokens that get logits, bit for bit."""
    make_checkpoint("nemotron-h-moe", tmp_path, {"layers_block_type": kinds, "intermediate_size": 96})
    runner = native_runner(tmp_path, torch.bfloat16)
    tokens = [list(range(first, first + 30)) for first in (1, 50)]
    step = runner.input([runner.row(prompt, 30) for prompt in tokens], [30, 30])
    with torch.inference_mode():
        everything = runner.model.forward(runner.model.embed(step), step)[step.logit_rows]
        step.hidden_rows = step.logit_rows
        assert torch.equal(runner.model.forward(runner.model.embed(step), step), everything)
