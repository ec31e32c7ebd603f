"""Tokens under a grammar do not depend on how the engine got to them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from toy_tokenizers import byte_level

from octavo.build import build_core
from octavo.config import EngineConfig
from octavo.core.params import SamplingParams
from octavo.core.request import GenerateRequest
from octavo.core.structured import StructuredOutputsParams
from octavo.hub.files import ModelFiles

TOKENIZER = byte_level()
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": TOKENIZER.get_vocab_size(),
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "eos_token_id": 2,
}
FORMS: list[dict[str, Any]] = [
    {"regex": r"(.|\n)*"},
    {"json": {"type": "array", "items": {"type": "integer"}, "maxItems": 9}},
    {"regex": "[a-f]{20,40}"},
    {"choice": ["a rather long choice indeed", "a rather short one", "b"]},
]
KV_BYTES_PER_TOKEN = 2 * 2 * 2 * 16 * 4
SETTINGS: dict[str, dict[str, Any]] = {
    "overlap": {"async_scheduling": True},
    "chunked prefill": {"max_num_batched_tokens": 8, "max_num_seqs": 8},
    "preemption": {"memory_bytes": 128 * KV_BYTES_PER_TOKEN, "max_model_len": 112},
    "overlap + preemption": {"async_scheduling": True, "memory_bytes": 128 * KV_BYTES_PER_TOKEN, "max_model_len": 112},
    "overlap + small batches": {"async_scheduling": True, "max_num_seqs": 3},
}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> ModelFiles:
    folder = tmp_path_factory.mktemp("tiny")
    TOKENIZER.save(str(folder / "tokenizer.json"))
    return ModelFiles(name="tiny", path=Path(folder), format="safetensors", weights=(), config=CONFIG)


def requests() -> list[GenerateRequest]:
    made = []
    for i in range(12):
        sampled: dict[str, Any] = {"temperature": 0} if i % 2 else {"temperature": 0.9, "seed": i, "n": 2}
        form = FORMS[i % len(FORMS)]
        option = msgspec.Raw(msgspec.msgpack.encode(StructuredOutputsParams(**form)))
        made.append(
            GenerateRequest(
                id=f"r{i}",
                tokens=list(range(10, 20 + 2 * i)),
                params=SamplingParams(max_tokens=24 + 3 * i, **sampled),
                options={"grammar": option},
            )
        )
    return made


def run(files: ModelFiles, asked: list[GenerateRequest], **settings: Any) -> dict[tuple[str, int], list[int]]:
    config = EngineConfig.of(
        **{"load_format": "dummy", "dtype": "float32", "memory_bytes": 1 << 22, "seed": 11, "threads": 1, **settings}
    )
    loop, info = build_core(config, files)
    assert "grammar" in info.features
    tokens: dict[tuple[str, int], list[int]] = {}
    for request in asked:
        loop.add(request)
    while loop.busy:
        for delta in loop.step():
            assert delta.error is None
            tokens.setdefault((delta.id, delta.index), []).extend(delta.tokens)
    loop.check_idle()
    if "memory_bytes" in settings:
        assert loop.stats().num_preemptions > 0
    return tokens


@pytest.fixture(scope="module")
def truth(files: ModelFiles) -> dict[tuple[str, int], list[int]]:
    alone: dict[tuple[str, int], list[int]] = {}
    for request in requests():
        alone |= run(files, [request])
    return alone


@pytest.mark.parametrize("name", SETTINGS)
def test_tokens_under_a_grammar_do_not_depend_on(
    name: str, files: ModelFiles, truth: dict[tuple[str, int], list[int]]
) -> None:
    assert run(files, requests(), **SETTINGS[name]) == truth
