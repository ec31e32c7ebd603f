"""The runner whose state lives on the device gives the CPU's tokens, however the steps are cut: depth, chunks, blocks.

Without a GPU the kernels run in Triton's interpreter, on few and short requests.
"""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from octavo.build import build_core
from octavo.config import EngineConfig
from octavo.core.params import SamplingParams
from octavo.core.request import GenerateRequest
from octavo.device.cpu import CpuDevice
from octavo.hub.files import ModelFiles

GPU = torch.cuda.is_available()
VOCAB = 131
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "eos_token_id": 3,
}
KV_BYTES_PER_TOKEN = 2 * 16 * 4
COUNT = 40 if GPU else 4

FEATURES: dict[str, dict[str, Any]] = {
    "overlap": {},
    "no overlap": {"async_scheduling": False},
    "chunked prefill": {"max_num_batched_tokens": 12, "max_num_seqs": 8},
    "no prefix cache": {"enable_prefix_caching": False},
    "small batches": {"max_num_seqs": 2},
    "preemption": {"memory_bytes": 144 * KV_BYTES_PER_TOKEN, "max_model_len": 128},
} | ({"eager": {"enforce_eager": True}} if GPU else {})


class Behind(CpuDevice):
    """A CPU that is driven as if it ran behind its host."""

    def __init__(self) -> None:
        super().__init__()
        self.resident = True
        self.default_depth = 1


def requests() -> list[GenerateRequest]:
    rng = random.Random(5)
    head = [rng.randrange(4, VOCAB) for _ in range(33)]
    made = []
    for i in range(COUNT):
        prompt = (head if i % 2 else []) + [rng.randrange(4, VOCAB) for _ in range(rng.randrange(1, 30))]
        sampled: dict[str, Any] = {"temperature": 0}
        if i % 3 == 1:
            sampled = {"temperature": 0, "repetition_penalty": 1.3, "frequency_penalty": 0.5, "logit_bias": {7: 1.5}}
        if i % 5 == 4:
            sampled = {"temperature": 0, "logprobs": 2}
        params = SamplingParams(max_tokens=rng.randrange(4, 60 if GPU else 7), min_tokens=3, **sampled)
        made.append(GenerateRequest(id=f"r{i}", tokens=prompt, params=params))
    return made


def drawn() -> list[GenerateRequest]:
    """Sampled ones, whose tokens are this runner's own."""
    settings = [
        {"temperature": 0.9},
        {"temperature": 1.2, "top_k": 20, "top_p": 0.9},
        {"temperature": 0.7, "min_p": 0.1},
    ]
    return [
        GenerateRequest(id=f"d{i}", tokens=[5 + i, 9, 11], params=SamplingParams(max_tokens=8, seed=i, **each))
        for i, each in enumerate(settings)
    ]


def run(asked: list[GenerateRequest], **settings: Any) -> dict[str, list[int]]:
    files = ModelFiles(name="tiny", path=Path("tiny"), format="safetensors", weights=(), config=CONFIG)
    config = EngineConfig.of(
        **{"load_format": "dummy", "dtype": "float32", "memory_bytes": 1 << 21, "seed": 11, "threads": 1, **settings}
    )
    loop, _ = build_core(config, files)
    tokens: dict[str, list[int]] = {}
    waiting = list(asked)
    while waiting or loop.busy:
        for request in waiting[:2]:
            loop.add(request)
        del waiting[:2]
        for delta in loop.step():
            assert delta.error is None, delta.error
            tokens.setdefault(delta.id, []).extend(delta.tokens)
            if delta.logprobs is not None:
                assert all(len(entry.top_ids) == 2 for entry in delta.logprobs)
    loop.check_idle()
    loop.close()
    return tokens


def resident(asked: list[GenerateRequest], monkeypatch: pytest.MonkeyPatch, **settings: Any) -> dict[str, list[int]]:
    if GPU:
        return run(asked, device="cuda", **settings)
    monkeypatch.setattr("octavo.worker.worker.select_device", lambda name: Behind())
    return run(asked, attention_backend="triton", **settings)


@cache
def truth() -> dict[str, list[int]]:
    return run(requests(), device="cpu", attention_backend="torch")


@pytest.mark.parametrize("name", FEATURES)
def test_greedy_tokens_are_those_of_the_cpu(name, monkeypatch):
    expected = truth()
    assert resident(requests(), monkeypatch, **FEATURES[name]) == expected


def test_drawn_tokens_depend_on_the_request_alone(monkeypatch):
    together = resident(drawn(), monkeypatch)
    alone: dict[str, list[int]] = {}
    for request in drawn()[:2]:
        alone |= resident([request], monkeypatch, async_scheduling=False)
    assert {name: together[name] for name in alone} == alone
    assert len({tuple(tokens) for tokens in together.values()}) == 3
