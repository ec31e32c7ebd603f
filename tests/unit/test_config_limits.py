"""Limits of a step that nobody set follow those that somebody did."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from toy_models import LLAMA_KV_BYTES_PER_TOKEN, model_files

from octavo.build import build_core
from octavo.build_worker import offline_tokens
from octavo.config import EngineConfig, SchedulerConfig
from octavo.core.errors import ConfigError
from octavo.core.info import ModelInfo
from octavo.device import host
from octavo.hub.files import ModelFiles
from octavo.models.feed_forwards.spec import ExpertsSpec, MlpSpec
from octavo.nn.experts_spec import RoutingSpec


@pytest.mark.parametrize(
    ("seqs", "tokens", "expected"),
    [
        (None, None, (1024, 8192)),
        (16, None, (16, 8192)),
        (None, 100, (100, 100)),
        (9000, None, (9000, 9000)),
        (50, 20, (50, 20)),  # refused later, with both named
    ],
)
def test_limits(seqs, tokens, expected):
    assert SchedulerConfig(max_num_seqs=seqs, max_num_batched_tokens=tokens).limits(1024, 8192, 16384) == expected


@pytest.mark.parametrize(
    ("mode", "stated", "tokens"),
    [
        ("balanced", None, 8192),
        ("interactivity", None, 2048),
        ("throughput", None, 16384),
        ("throughput", 4096, 4096),  # a stated number counts
    ],
)
def test_the_performance_mode_sets_the_default_tokens_of_a_step(mode, stated, tokens):
    config = SchedulerConfig(performance_mode=mode, max_num_batched_tokens=stated)
    assert config.limits(1024, 8192, 16384) == (1024, tokens)


@pytest.mark.parametrize(
    ("experts", "top_k", "tokens"),
    [(128, 8, 16384), (64, 6, 8192), (64, 4, 16384), (8, 2, 8192), (256, 4, 16384)],
)
def test_offline_steps_give_experts_many_rows(experts, top_k, tokens):
    routing = RoutingSpec(top_k=top_k)
    spec = SimpleNamespace(mlps=[MlpSpec(size=8), ExpertsSpec(num_experts=experts, size=8, routing=routing)])
    device = SimpleNamespace(default_limits=(1024, 8192), largest_step=16384)
    assert offline_tokens(SimpleNamespace(spec=spec, device=device)) == tokens


def test_offline_steps_of_other_models_are_as_large_as_a_servers():
    device = SimpleNamespace(default_limits=(256, 2048), largest_step=4096)
    for spec in (SimpleNamespace(mlps=[MlpSpec(size=8)]), SimpleNamespace()):
        assert offline_tokens(SimpleNamespace(spec=spec, device=device)) == 2048


@pytest.mark.parametrize(
    ("parallel", "tokens"),
    [
        ({}, 64),
        ({"tensor_parallel_size": 2, "enable_expert_parallel": True}, 64),
        ({"data_parallel_size": 3}, 64),  # of each replica
        ({"data_parallel_size": 3, "enable_expert_parallel": True}, 192),  # of the ranks of one engine
    ],
)
def test_tokens_of_a_step_are_those_of_each_rank_that_has_its_own_requests(parallel, tokens):
    assert EngineConfig.of(max_num_batched_tokens=64, max_num_seqs=8, **parallel).step_limits((1024, 8192, 16384)) == (
        8,
        tokens,
    )


def sized(**settings: Any) -> ModelInfo:
    given = {"load_format": "dummy", "dtype": "float32", "threads": 1, "max_num_seqs": 4}
    loop, info = build_core(EngineConfig.of(**given | settings), model_files())
    loop.close()
    return info


def test_a_number_of_blocks_is_the_size_of_the_cache():
    info = sized(num_gpu_blocks_override=9)
    assert (info.num_blocks, info.max_model_len) == (9, 9 * 16)
    assert info.memory["kv_cache"] == 9 * 16 * LLAMA_KV_BYTES_PER_TOKEN
    assert sized(num_gpu_blocks_override=100).num_blocks == 100  # more than 4 requests of 256 tokens could use
    assert sized(num_gpu_blocks_override=9, kv_cache_memory_bytes=1 << 30).num_blocks == 9


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"kv_cache_memory_bytes": 16 * 8 * LLAMA_KV_BYTES_PER_TOKEN}, "Lower the first to 8, or leave one of them"),
        ({"max_model_len": 200}, "raise --num-gpu-blocks-override to 13"),
        ({"num_gpu_blocks_override": 1}, "raise --num-gpu-blocks-override to 2"),
        ({"num_gpu_blocks_override": 1 << 40}, "bytes"),
    ],
)
def test_a_number_of_blocks_that_can_not_be(settings, says):
    with pytest.raises(ConfigError, match=says):
        sized(**{"num_gpu_blocks_override": 9} | settings)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"max_model_len": 257}, "--max-model-len 257 is more than the model's own maximum of 256 positions"),
        ({"max_model_len": 200, "num_gpu_blocks_override": 9}, "raise --num-gpu-blocks-override to 13"),
        ({"max_model_len": 200, "kv_cache_memory_bytes": 1 << 15}, "raise --kv-cache-memory-bytes to"),
        ({"max_model_len": 200, "gpu_memory_utilization": 0.001}, "raise --kv-cache-memory-bytes to"),
    ],
)
def test_too_long_requests_are_refused_before_the_weights_are_loaded(
    settings: dict[str, Any], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "available_memory", lambda: 1 << 25)
    monkeypatch.setattr("octavo.worker.worker.load_weights", lambda *_, **__: pytest.fail("weights are loaded"))
    with pytest.raises(ConfigError, match=says):
        sized(device="cpu", **settings)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"runner": "generate"}, "--runner generate: "),
        ({"kv_cache_dtype": "int8"}, "--kv-cache-dtype int8: "),
        ({"num_gpu_blocks_override": 9}, "--num-gpu-blocks-override 9: "),
        ({"disable_sliding_window": True}, "--disable-sliding-window: "),
        ({"enable_sleep_mode": True}, "--enable-sleep-mode: "),
        ({"head_dtype": "int8"}, "--head-dtype int8: "),
        ({"activation_dtype": "int8"}, "--activation-dtype int8: "),
    ],
)
def test_an_encoder_refuses_what_is_for_text(settings: dict[str, Any], named: str, tmp_path: Path):
    """Before any of its weights is looked for: there are none here."""
    config = {"architectures": ["BertModel"]}
    files = ModelFiles(name="bert", path=tmp_path, format="safetensors", weights=(), config=config)
    with pytest.raises(ConfigError, match=f"{named}bert is an encoder \\(BertModel\\), .*Leave it out"):
        build_core(EngineConfig.of(**settings), files)
