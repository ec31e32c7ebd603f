"""Two GPUs give one GPU's tokens, with recorded steps and without: needs two NVIDIA GPUs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from toy_engine import drive, tiny_config, tokens_of
from toy_models import LLAMA, VOCAB, model_files

from octavo.build import build_core
from octavo.core.params import SamplingParams
from octavo.core.request import GenerateRequest

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs"),
]

EVEN = LLAMA | {"vocab_size": VOCAB + 1}


def tokens(**settings: Any) -> dict[tuple[str, int], list[int]]:
    params = [
        SamplingParams(max_tokens=24, temperature=0),
        SamplingParams(max_tokens=24, temperature=0.9, top_k=20, seed=5),
        SamplingParams(max_tokens=24, temperature=0, repetition_penalty=1.3, logprobs=2),
    ]
    asked = [
        GenerateRequest(id=str(i), tokens=[(7 * i + j) % 100 + 4 for j in range(5 + 9 * i)], params=params[i % 3])
        for i in range(9)
    ]
    loop, _ = build_core(tiny_config(device="cuda", **settings), model_files(EVEN))
    found = tokens_of(drive(loop, asked))
    loop.close()
    return found


@pytest.mark.parametrize("eager", [False, True], ids=["graphs", "eager"])
@pytest.mark.parametrize("ahead", [False, True], ids=["in step", "overlap"])
def test_two_gpus_give_the_tokens_of_one(*, eager: bool, ahead: bool) -> None:
    settings = {"enforce_eager": eager, "async_scheduling": ahead}
    assert tokens(tensor_parallel_size=2, **settings) == tokens(**settings)
