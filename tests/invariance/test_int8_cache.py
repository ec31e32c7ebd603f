"""With keys and values in int8, on a CPU, a request's tokens do not depend on how the engine got to them either."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from test_invariance import FEATURES, alone, requests, run
from toy_engine import tiny_config
from toy_models import model_files

from octavo.build import build_core

BYTES_PER_TOKEN = 2 * 2 * 2 * (16 + 4)
"""Layers, key-value heads, key and value; a byte for each channel and a scale in float32."""
INT8: dict[str, Any] = {"kv_cache_dtype": "int8"}
CHANGES: dict[str, dict[str, Any]] = {
    name: FEATURES[name] for name in ("overlap", "chunked prefill", "small batches", "large blocks", "two threads")
} | {"preemption": {"memory_bytes": 192 * BYTES_PER_TOKEN, "max_model_len": 160}}


@cache
def truth() -> dict[tuple[str, int], list[int]]:
    return alone(**INT8)


@pytest.mark.parametrize("names", [*((name,) for name in CHANGES), ("chunked prefill", "preemption")], ids=" + ".join)
def test_tokens_do_not_depend_on(names: tuple[str, ...]) -> None:
    settings: dict[str, Any] = {}
    for name in names:
        settings |= CHANGES[name]
    tokens, stats = run(requests(), **INT8, **settings)
    assert tokens == truth()
    assert stats.prefix_cache_hits > 0
    if "preemption" in names:
        assert stats.num_preemptions > 0


@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_without_kernels_it_works_too(backend: str) -> None:
    """Rounded alike, so that what they choose is the same but for near ties; that much of the beginning shows it."""
    tokens, _ = run(requests()[:3], **INT8, attention_backend=backend)
    assert {name: len(found) for name, found in tokens.items()} == {name: len(truth()[name]) for name in tokens}
    assert sum(found[:5] == truth()[name][:5] for name, found in tokens.items()) > len(tokens) / 2


@pytest.mark.parametrize("name", ["int8", "int8_per_token_head"])
def test_its_capacity_counts_the_scales(name: str) -> None:
    settings = {"memory_bytes": 1 << 18, "max_model_len": 160}
    _, info = build_core(tiny_config(**settings, kv_cache_dtype=name), model_files())
    assert info.kv_bytes_per_token == BYTES_PER_TOKEN
    assert info.num_blocks == (1 << 18) // (16 * BYTES_PER_TOKEN)
    assert info.kv_form == "int8"
