"""Vectors are the same however the steps are cut, whoever shares them, and whichever runner computes them.

Without a GPU the resident runner's kernels run in Triton's interpreter, on few and short requests.
"""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import msgspec
import pytest
import torch
from rank_kit import CONTEXTS, PIPELINE, TWO_RANKS, ranks_in_threads
from toy_engine import drive, tiny_config
from toy_models import QWEN3, VOCAB, behind, model_files

pytest.importorskip("triton")

from octavo.build import build_core
from octavo.core.errors import ConfigError
from octavo.core.params import SamplingParams
from octavo.core.request import GenerateRequest
from octavo.features.pooling.params import PoolingSpec
from octavo.features.pooling.payload import NAME as OPTION
from octavo.features.pooling.requests import pooled_output

GPU = torch.cuda.is_available()
ENCODER = {
    "architectures": ["BertModel"],
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 96,
    "max_position_embeddings": 64,
}


def asked(*, generating: bool = True) -> list[GenerateRequest]:
    """Prompts for all kinds of pooling, some with a common beginning, between requests that generate."""
    rng = random.Random(3)
    head = [rng.randrange(4, VOCAB) for _ in range(20)]
    made = []
    kinds = [("mean", "embed"), ("last", "embed"), ("cls", "embed"), ("mean", "token_embed"), ("last", "embed")]
    for i, (pooling, task) in enumerate(kinds):
        params = PoolingSpec(pooling=pooling, task=task, activation="none")
        made.append(
            GenerateRequest(
                id=f"p{i}",
                tokens=head + [rng.randrange(4, VOCAB) for _ in range(1 + 3 * i)],
                params=SamplingParams(max_tokens=1),
                options={OPTION: msgspec.Raw(msgspec.msgpack.encode(params))},
                prompt_only=True,
                reads_cache=generating and not params.sees_all,
            )
        )
        if generating:
            params_g = SamplingParams(max_tokens=3, temperature=0)
            made.append(GenerateRequest(id=f"g{i}", tokens=head[: 4 * i + 1], params=params_g))
    return made


def run(config: dict[str, Any], requests: list[GenerateRequest], **settings: Any) -> dict[str, Any]:
    """Vectors and tokens by request."""
    loop, _ = build_core(tiny_config(**{"memory_bytes": 1 << 21, **settings}), model_files(config))
    found: dict[str, Any] = {}
    for delta in drive(loop, requests):
        assert delta.error is None, delta.error
        if delta.id.startswith("g"):
            found.setdefault(delta.id, []).extend(delta.tokens)
        else:
            found[delta.id] = torch.tensor(pooled_output(delta).pooled.values())
    loop.close()
    return found


@cache
def truth() -> dict[str, Any]:
    return run(QWEN3, asked(), device="cpu", attention_backend="torch", enable_prefix_caching=False)


def check(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if isinstance(value, list):
            assert found[name] == value
        else:
            torch.testing.assert_close(found[name], value, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize(
    "settings",
    [
        {"attention_backend": "torch"},
        {"max_num_batched_tokens": 9, "max_num_seqs": 4},
        {"max_num_batched_tokens": 7, "max_num_seqs": 3, "async_scheduling": True},
        {"memory_bytes": 128 * 128, "max_model_len": 64, "max_num_batched_tokens": 16, "max_num_seqs": 8},
        pytest.param(
            {"max_num_batched_tokens": 9, "max_num_seqs": 4, "distributed_executor_backend": "mp"},
            marks=pytest.mark.slow,
        ),
        {"max_num_batched_tokens": 9, "max_num_seqs": 4, **TWO_RANKS},
        pytest.param(CONTEXTS, marks=pytest.mark.slow),
    ],
    ids=["prefix cache", "chunks", "overlap", "little room", "a process of its own", "two ranks", "divided prompts"],
)
def test_decoders(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    ranks_in_threads(monkeypatch)
    check(run(QWEN3, asked(), **{"device": "cpu"} | settings), truth())


def test_the_last_stage_of_a_pipeline_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks_in_threads(monkeypatch)
    deeper, few = QWEN3 | {"num_hidden_layers": 2}, {"max_num_batched_tokens": 9, "max_num_seqs": 4}
    check(run(deeper, asked(), **few, **PIPELINE), run(deeper, asked(), **few, device="cpu"))


def test_the_resident_runner(monkeypatch: pytest.MonkeyPatch) -> None:
    check(run(QWEN3, asked(), max_num_batched_tokens=24, max_num_seqs=4, **behind(monkeypatch)), truth())


@pytest.mark.parametrize(
    "settings",
    [
        {"max_num_seqs": 1},
        {"async_scheduling": True, "max_num_seqs": 2},
        {"distributed_executor_backend": "mp"},
        *([{"device": "cuda"}] if GPU else []),
    ],
    ids=str,
)
def test_encoders(settings: dict[str, Any]) -> None:
    expected = run(ENCODER, asked(generating=False), device="cpu")
    check(run(ENCODER, asked(generating=False), **{"device": "cpu", **settings}), expected)


def test_encoders_are_not_divided() -> None:
    with pytest.raises(ConfigError, match="--tensor-parallel-size 2: tiny is an encoder, which runs on one device"):
        run(ENCODER, asked(generating=False), **TWO_RANKS)
