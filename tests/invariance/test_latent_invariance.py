"""With latent attention, a request's tokens do not depend on how the engine got to them either."""

from __future__ import annotations

import itertools
from functools import cache
from typing import Any

import pytest
import torch
from test_invariance import FEATURES, requests
from toy_drafter import runner_of
from toy_engine import drive, one_by_one, tiny_config, tokens_of
from toy_graphs import recorded_graphs
from toy_models import LATENT, LATENT_BYTES_PER_TOKEN, VOCAB, behind, model_files

from octavo.build import build_core
from octavo.core.errors import ConfigError
from octavo.core.params import SamplingParams
from octavo.core.request import GenerateRequest
from octavo.core.stats import EngineStats
from octavo.worker.native_replay import NativeReplay

CHANGES: dict[str, dict[str, Any]] = {
    name: FEATURES[name] for name in ("overlap", "chunked prefill", "small batches", "large blocks", "priorities")
} | {
    "no prefix cache": {"enable_prefix_caching": False},
    "preemption": {"memory_bytes": 192 * LATENT_BYTES_PER_TOKEN, "max_model_len": 160},
    "plain attention": {"attention_backend": "reference"},
    "attention in torch": {"attention_backend": "torch"},
}
QUICK = [
    ("overlap",),
    ("plain attention",),
    ("attention in torch",),
    ("large blocks",),
    ("chunked prefill", "preemption"),
]
NIGHTLY = [
    pair
    for pair in (*((name,) for name in CHANGES), *itertools.combinations(CHANGES, 2))
    if pair not in QUICK
    and set(pair) not in ({"chunked prefill", "small batches"}, {"plain attention", "attention in torch"})
]
PAIRS = [*QUICK, *(pytest.param(pair, marks=pytest.mark.slow) for pair in NIGHTLY)]
GPU = torch.cuda.is_available()


def run(
    asked: list[GenerateRequest], config: dict[str, Any] = LATENT, **settings: Any
) -> tuple[dict[tuple[str, int], list[int]], EngineStats]:
    loop, _ = build_core(tiny_config(**settings), model_files(config))
    found = tokens_of(drive(loop, asked)), loop.stats()
    loop.close()
    return found


@cache
def truth() -> dict[tuple[str, int], list[int]]:
    """The tokens of each request alone, computed whole, with nothing left in the cache by others."""
    plain = {"enable_prefix_caching": False, "async_scheduling": False, "attention_backend": "native"}
    loop, _ = build_core(tiny_config(**plain, device="cpu"), model_files(LATENT))
    assert type(runner_of(loop).replay) is NativeReplay
    found = tokens_of(one_by_one(loop, requests()))
    loop.close()
    return found


@pytest.mark.parametrize("names", PAIRS, ids=" + ".join)
def test_tokens_do_not_depend_on(names: tuple[str, ...]) -> None:
    settings: dict[str, Any] = {"device": "cpu"}
    for name in names:
        settings |= CHANGES[name]
    tokens, stats = run(requests(), **settings)
    assert tokens == truth()
    if "preemption" in names:
        assert stats.num_preemptions > 0
    if "no prefix cache" not in names:
        assert stats.prefix_cache_hits > 0


def few() -> list[GenerateRequest]:
    """Short greedy requests, two with a common prefix, for kernels in Triton's interpreter."""
    count = 40 if GPU else 3
    head = [5 + i % (VOCAB - 9) for i in range(17)]
    params = SamplingParams(max_tokens=30 if GPU else 3, temperature=0)
    prompts = [[*head[i % 2 :], 7 + i, 9 + i] for i in range(count)]
    return [GenerateRequest(id=f"r{i}", tokens=prompt, params=params) for i, prompt in enumerate(prompts)]


SMALLER = LATENT | {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}


@pytest.mark.parametrize("recorded", [True, False], ids=["recorded", "launched"])
def test_the_resident_runner_gives_the_same_tokens(recorded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In steps with and without prompts, which are recorded, or else computed in the form that takes less."""
    expected, _ = run(few(), SMALLER, device="cpu", attention_backend="torch")
    replayed = recorded_graphs(monkeypatch) if recorded else {"forward": 1, "mixed": 1}
    settings = {"max_num_batched_tokens": 16, "max_num_seqs": 2} if recorded else {"enforce_eager": True}
    tokens, stats = run(few(), SMALLER, **behind(monkeypatch), **settings)
    assert tokens == expected
    assert stats.prefix_cache_hits > 0
    assert replayed["forward"]
    assert replayed["mixed"]


def test_a_token_takes_one_latent_per_layer() -> None:
    _, info = build_core(tiny_config(memory_bytes=1 << 18, max_model_len=160), model_files(LATENT))
    assert info.kv_bytes_per_token == LATENT_BYTES_PER_TOKEN
    assert info.num_blocks == (1 << 18) // (16 * LATENT_BYTES_PER_TOKEN)


def test_other_dtypes_of_the_cache_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"--kv-cache-dtype int8: this model has latent attention.*Leave it out"):
        build_core(tiny_config(kv_cache_dtype="int8"), model_files(LATENT))


def test_backends_without_latent_attention_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"'flash_attn' can't compute latent attention here.*torch: usable"):
        build_core(tiny_config(attention_backend="flash_attn", device="cpu"), model_files(LATENT))


def test_the_log_says_why_a_model_runs_in_torch(caplog: pytest.LogCaptureFixture) -> None:
    build_core(tiny_config(device="cpu"), model_files(LATENT | {"v_head_dim": 12}))
    assert (
        "in torch: the native backend of latent attention needs widths that are multiples of 16, not 32, 16, 16, 12"
        in caplog.text
    )
