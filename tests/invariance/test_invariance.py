"""The tokens of a request must not depend on how the engine got to them: under no pair of its features.

A tiny random model in float32; the truth is each request alone, computed whole, one step after the other, on the same
device: what is drawn depends on it.
"""

from __future__ import annotations

import itertools
import random
from functools import cache
from typing import Any

import pytest
from toy_engine import device_of, drive, one_by_one, tiny_config, tokens_of
from toy_models import LLAMA_KV_BYTES_PER_TOKEN, VOCAB, model_files

from octavo.build import build_core
from octavo.core.params import SamplingParams
from octavo.core.plan import StepPlan
from octavo.core.request import GenerateRequest
from octavo.core.stats import EngineStats
from octavo.engine.executor import AnyExecutor, LaunchedStep

FEATURES: dict[str, dict[str, Any]] = {
    "overlap": {"async_scheduling": True},
    "chunked prefill": {"max_num_batched_tokens": 8, "max_num_seqs": 8},
    "preemption": {"memory_bytes": 192 * LLAMA_KV_BYTES_PER_TOKEN, "max_model_len": 160},
    "no prefix cache": {"enable_prefix_caching": False},
    "small batches": {"max_num_seqs": 3},
    "large blocks": {"block_size": 32},
    "plain attention": {"attention_backend": "reference"},
    "torch attention": {"attention_backend": "torch"},
    "two threads": {"threads": 2},
    "priorities": {"policy": "priority"},
}
PAIRS = [(name,) for name in FEATURES] + list(itertools.combinations(FEATURES, 2))
CONFLICTS = {frozenset({"plain attention", "torch attention"}), frozenset({"chunked prefill", "small batches"})}


def requests() -> list[GenerateRequest]:
    rng = random.Random(5)
    prefixes = [[rng.randrange(4, VOCAB) for _ in range(n)] for n in (48, 17)]
    made = []
    for i in range(12):
        prompt = rng.choice([*prefixes, []]) + [rng.randrange(4, VOCAB) for _ in range(rng.randrange(1, 40))]
        sampled: dict[str, Any] = {"temperature": 0}
        if i % 3 == 1:
            sampled = {"temperature": 0.9, "top_k": 20, "top_p": 0.9, "seed": i, "n": 1 + i % 2}
        if i % 3 == 2:
            sampled = {"temperature": 0, "repetition_penalty": 1.3, "frequency_penalty": 0.5, "logit_bias": {7: 1.5}}
        params = SamplingParams(max_tokens=rng.randrange(8, 60), min_tokens=5, **sampled)
        made.append(GenerateRequest(id=f"r{i}", tokens=prompt, params=params, priority=i % 2))
    return made


class Faulty:
    """An executor whose step raises once, when it has been computed and has left its traces on the worker."""

    def __init__(self, executor: AnyExecutor, at: int) -> None:
        self.executor, self.at = executor, at

    def forward(self, plan: StepPlan) -> LaunchedStep:
        step = self.executor.forward(plan)
        if plan.id == self.at:
            raise RuntimeError("a planted fault")
        return step

    def sample(self, step: LaunchedStep, payload: dict[str, Any]) -> None:
        self.executor.sample(step, payload)

    def close(self) -> None:
        self.executor.close()


def run(
    asked: list[GenerateRequest], *, fault_at: int | None = None, **settings: Any
) -> tuple[dict[tuple[str, int], list[int]], EngineStats]:
    loop, _ = build_core(tiny_config(**settings), model_files())
    if fault_at is not None:
        loop._executor = Faulty(loop._executor, fault_at)
    found = tokens_of(drive(loop, asked)), loop.stats()
    loop.close()
    return found


def alone(**settings: Any) -> dict[tuple[str, int], list[int]]:
    """The tokens of each of `requests`, with nothing left in the cache by others."""
    plain = {"enable_prefix_caching": False, "async_scheduling": False}
    loop, _ = build_core(tiny_config(**plain, **settings), model_files())
    found = tokens_of(one_by_one(loop, requests()))
    loop.close()
    return found


@cache
def truth(device: str) -> dict[tuple[str, int], list[int]]:
    return alone(attention_backend="reference", device=device)


@pytest.mark.parametrize("names", [p for p in PAIRS if frozenset(p) not in CONFLICTS], ids=" + ".join)
def test_tokens_do_not_depend_on(names):
    settings: dict[str, Any] = {}
    for name in names:
        settings |= FEATURES[name]
    tokens, stats = run(requests(), **settings)
    assert tokens == truth(device_of(settings))
    if "preemption" in names and "small batches" not in names:
        assert stats.num_preemptions > 0
    if "no prefix cache" not in names:
        assert stats.prefix_cache_hits > 0


@pytest.mark.parametrize("names", [(), ("overlap",), ("chunked prefill",), ("preemption",)], ids=" + ".join)
@pytest.mark.parametrize("fault_at", [7, 20])
def test_a_step_that_fails_changes_no_tokens(names: tuple[str, ...], fault_at: int) -> None:
    settings: dict[str, Any] = {}
    for name in names:
        settings |= FEATURES[name]
    tokens, stats = run(requests(), fault_at=fault_at, **settings)
    assert tokens == truth(device_of(settings))
    assert stats.num_preemptions > 1, "several were in flight, and were computed again"


def test_the_truth_is_worth_comparing_with():
    """Different requests give different tokens, and several lengths and ends occur."""
    outputs = list(truth(device_of({})).values())
    assert len({tuple(tokens) for tokens in outputs}) == len(outputs)
    assert len({len(tokens) for tokens in outputs}) > 5
