"""The tokens of a bridged model don't depend on how the engine got to them, and equal those of Octavo's own model."""

from __future__ import annotations

import dataclasses
import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from bridge_kit import save
from tiny import model_files
from toy_engine import device_of, drive, tiny_config, tokens_of

from octavo.build import build_core
from octavo.core.params import SamplingParams
from octavo.core.request import GenerateRequest
from octavo.core.stats import EngineStats

BLOCKS = {"num_blocks": 7, "max_model_len": 80}
BRIDGED = {"model_impl": "transformers"}
FORMS: dict[str, dict[str, Any]] = {
    "chunked, preempted": {"max_num_batched_tokens": 8, "max_num_seqs": 8, **BLOCKS},
    "chunked, no overlap": {"max_num_batched_tokens": 12, "max_num_seqs": 4, "async_scheduling": False},
    "preempted, no prefix cache": {"enable_prefix_caching": False, **BLOCKS},
    "torch attention, depth 2": {"attention_backend": "torch", "depth": 2},
}


@pytest.fixture(scope="module", params=["ministral", "arcee"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of windows and full attention, which has two cache groups; and one of full attention."""
    made = tmp_path_factory.mktemp(request.param)
    save(request.param, made)
    return made


def requests() -> list[GenerateRequest]:
    rng = random.Random(5)
    head = [rng.randrange(4, 199) for _ in range(35)]
    ways: list[dict[str, Any]] = [
        {"temperature": 0, "logprobs": 2, "prompt_logprobs": 1},
        {"temperature": 0.9, "top_k": 20, "seed": 3, "n": 2},
        {"temperature": 0, "repetition_penalty": 1.3},
    ]
    made = []
    for i in range(6):
        prompt = (head if i % 2 else []) + [rng.randrange(4, 199) for _ in range(rng.randrange(1, 24))]
        params = SamplingParams(max_tokens=rng.randrange(8, 20), min_tokens=5, **ways[i % 3])
        made.append(GenerateRequest(id=f"r{i}", tokens=prompt, params=params))
    return made


def run(folder: Path, asked: list[GenerateRequest], **settings: Any) -> tuple[dict[Any, list[int]], EngineStats]:
    loop, _ = build_core(tiny_config(**{**BRIDGED, "load_format": "auto", **settings}), model_files(folder))
    return tokens_of(drive(loop, asked)), loop.stats()


@cache
def truth(folder: Path, device: str) -> dict[Any, list[int]]:
    """Each request alone."""
    alone: dict[Any, list[int]] = {}
    settings = {**BRIDGED, "load_format": "auto", "enable_prefix_caching": False, "device": device}
    loop, _ = build_core(tiny_config(**settings), model_files(folder))
    for request in requests():
        alone |= tokens_of(drive(loop, [request]))
    return alone


@pytest.mark.parametrize("form", FORMS)
def test_tokens_do_not_depend_on(folder: Path, form: str) -> None:
    tokens, stats = run(folder, requests(), **FORMS[form])
    assert tokens == truth(folder, device_of(FORMS[form]))
    assert stats.num_preemptions > 0 or "preempted" not in form
    assert stats.prefix_cache_hits > 0 or "no prefix cache" in form


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_tokens_equal_those_of_the_own_implementation(name: str, tmp_path: Path) -> None:
    save(name, tmp_path)
    own, _ = run(tmp_path, requests(), model_impl="octavo")
    bridged, _ = run(tmp_path, requests())
    assert bridged == own


def test_random_weights_need_no_files(folder: Path) -> None:
    files = dataclasses.replace(model_files(folder), weights=())
    loop, info = build_core(tiny_config(**BRIDGED), files)
    tokens = tokens_of(drive(loop, requests()))
    assert all(tokens.values())
    assert "transformers" in info.kernels
