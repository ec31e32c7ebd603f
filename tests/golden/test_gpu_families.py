"""Every family of decoders on a GPU, in float32 and with the whole engine around it, against the CPU's reference, which
`test_families_golden.py` compares with Transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from paged import PagedRunner
from tiny import FAMILIES, load_model, make_checkpoint, model_files, reference_of
from tiny_families import DENSE, HYBRID, HYBRID_MOE, MOE
from toy_engine import drive, tokens_of

from octavo.build import build_core
from octavo.config import EngineConfig
from octavo.core.params import SamplingParams
from octavo.core.request import GenerateRequest
from octavo.hub.files import ModelFiles

LENGTHS = (5, 43, 1, 70)
"""Prompts shorter and longer than windows, blocks and a step's tokens."""
NEW = 8
TIE = 1e-3
"""Logits that differ by less may come in another order."""


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("family", [*FAMILIES, *DENSE, *HYBRID, *HYBRID_MOE, *MOE])
def test_greedy_tokens_recorded_and_eager(family: str, tmp_path: Path) -> None:
    files = checkpoint(family, tmp_path)
    for eager in (True, False):
        check(files, generated(files, device="cuda", enforce_eager=eager), f"{eager=}")


@pytest.mark.parametrize("family", ["llama4", "gpt-oss", "granite-hybrid-moe", "gemma4-small"])
def test_the_same_on_a_cpu(family: str, tmp_path: Path) -> None:
    """What the test above compares, on any machine: the engine in chunks, with several requests at once."""
    files = checkpoint(family, tmp_path)
    check(files, generated(files, device="cpu"), "cpu")


def checkpoint(family: str, folder: Path) -> ModelFiles:
    make_checkpoint(family, folder)
    return model_files(folder)


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(13)
    return [torch.randint(1, 199, (n,), generator=generator).tolist() for n in LENGTHS]


def generated(files: ModelFiles, **settings: Any) -> list[list[int]]:
    """The prompts' greedy continuations, in steps of at most 64 tokens."""
    limits = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 96, "memory_bytes": 1 << 23}
    loop, _ = build_core(EngineConfig.of(dtype="float32", threads=1, **limits, **settings), files)
    params = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True)
    asked = [GenerateRequest(id=str(i), tokens=prompt, params=params) for i, prompt in enumerate(prompts())]
    tokens = tokens_of(drive(loop, asked))
    loop.close()
    return [tokens[str(i), 0] for i in range(len(asked))]


def check(files: ModelFiles, continuations: list[list[int]], label: str) -> None:
    """Each token must be the best of the reference's logits for the tokens before it."""
    runner = PagedRunner(load_model(files, reference_of(files)), num_blocks=16, block_size=16)
    for prompt, tokens in zip(prompts(), continuations, strict=True):
        known = [*prompt, *tokens[:-1]]
        logits = runner.step([runner.row(known, len(known))], [len(known)], all_logits=True)[len(prompt) - 1 :]
        behind = logits.amax(-1) - logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        assert len(tokens) == NEW
        assert bool((behind < TIE).all()), f"{label}, {len(prompt)} tokens: {behind.tolist()}"
