"""Bridged models on a device behind its host: the tokens are those of the CPU, and steps are recorded.

Without a GPU, graphs are recorded by `toy_graphs` and kernels run in Triton's interpreter.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

from bridge_kit import save
from tiny import model_files
from toy_engine import drive, tiny_config, tokens_of
from toy_graphs import recorded_graphs
from toy_models import behind

from octavo.build import build_core
from octavo.core.params import SamplingParams
from octavo.core.request import GenerateRequest


def requests() -> list[GenerateRequest]:
    rng = random.Random(5)
    head = [rng.randrange(4, 199) for _ in range(17)]
    made = []
    for i in range(3):
        prompt = (head if i % 2 else []) + [rng.randrange(4, 199) for _ in range(rng.randrange(1, 12))]
        params = SamplingParams(max_tokens=rng.randrange(3, 6), temperature=0, logprobs=2 if i == 2 else None)
        made.append(GenerateRequest(id=f"r{i}", tokens=prompt, params=params))
    return made


def run(folder: Path, **settings: Any) -> dict[Any, list[int]]:
    config = tiny_config(**{"load_format": "auto", "memory_bytes": 1 << 21, **settings})
    loop, _ = build_core(config, model_files(folder))
    tokens = tokens_of(drive(loop, requests()))
    loop.close()
    return tokens


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "vaultgemma"])
def test_recorded_steps_give_the_tokens_of_the_cpu(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows per layer, soft caps and a shared head; learned positions."""
    save(name, tmp_path, num_hidden_layers=2)
    expected = run(tmp_path, device="cpu", attention_backend="torch", model_impl="transformers")
    replayed = recorded_graphs(monkeypatch)
    settings = {**behind(monkeypatch), "max_num_batched_tokens": 16, "max_num_seqs": 4, "model_impl": "transformers"}
    assert run(tmp_path, **settings) == expected
    assert replayed["forward"]
    assert replayed["mixed"]
    assert replayed["sample"]
