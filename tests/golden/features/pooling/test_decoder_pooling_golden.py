"""Vectors of decoders against Transformers: through chunks, the prefix cache and preemptions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import toy_tokenizers
import transformers
from tiny import vary_vectors

from octavo import LLM
from octavo.core.errors import ConfigError, InvalidRequestError
from octavo.core.params import SamplingParams

LENGTHS = (3, 70, 128, 16, 1, 50)
BACKENDS = ("native", "torch")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    return make(tmp_path_factory.mktemp("decoder"), transformers.Qwen3ForCausalLM)


def make(folder: Path, kind: Any) -> tuple[Path, Any]:
    config = transformers.Qwen3Config(
        vocab_size=440,
        hidden_size=64,
        intermediate_size=112,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=128,
        initializer_range=0.15,
    )
    torch.manual_seed(0)
    model = kind(config).eval()
    vary_vectors(model, 0.3)
    model.save_pretrained(folder)
    toy_tokenizers.byte_level().save(str(folder / "tokenizer.json"))
    return folder, model


def prompts() -> list[list[int]]:
    rng = np.random.default_rng(3)
    return [rng.integers(5, 390, size).tolist() for size in LENGTHS]


def states(model: Any, tokens: list[int]) -> np.ndarray:
    with torch.no_grad():
        return getattr(model, "model", model)(torch.tensor([tokens])).last_hidden_state[0].numpy()


def pooled(hidden: np.ndarray, pooling: str) -> np.ndarray:
    return {"MEAN": hidden.mean(0), "CLS": hidden[0], "LAST": hidden[-1]}[pooling]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("pooling", ["MEAN", "LAST", "CLS"])
def test_a_prompt_in_chunks_pools_to_the_same_vector(checkpoint: tuple[Path, Any], pooling: str, backend: str) -> None:
    """Twice, so that the second time the cache has all of it; only the last token's state may come by way of that."""
    folder, model = checkpoint
    settings = {"max_num_batched_tokens": 24, "max_num_seqs": 4, "kv_cache_memory_bytes": 2 << 20, "threads": 1}
    with LLM(
        str(folder),
        dtype="float32",
        device="cpu",
        attention_backend=backend,
        pooler_config={"pooling_type": pooling, "normalize": False},
        **settings,
    ) as llm:
        for cached in (False, True):
            found = llm.embed(prompts())
            for tokens, one in zip(prompts(), found, strict=True):
                expected = pooled(states(model, tokens), pooling)
                np.testing.assert_allclose(one.outputs.embedding, expected, atol=3e-5, rtol=1e-4)
                assert bool(one.num_cached_tokens) == (cached and pooling == "LAST" and len(tokens) > 16)
        assert llm.stats().generation_tokens == 0


def test_preemption_changes_no_vector(checkpoint: tuple[Path, Any]) -> None:
    """Generating requests of higher rank take the room of prompts that are half done."""
    folder, model = checkpoint
    with LLM(
        str(folder),
        dtype="float32",
        pooler_config={"pooling_type": "MEAN", "normalize": False},
        max_num_batched_tokens=16,
        max_num_seqs=2,
        policy="priority",
        kv_cache_memory_bytes=2 << 20,
        threads=1,
    ) as llm:
        asked = [llm._pooling.prepare(tokens, llm._pooling.preparer.params(), priority=1) for tokens in prompts()[1:3]]
        core = llm._core.loop
        for request in asked:
            core.add(request)
        core.step()
        core.step()
        urgent = [llm._engine.open([9, 8, 7, n], SamplingParams(max_tokens=3, temperature=0)).request for n in range(4)]
        for request in urgent:
            core.add(request)
        news = {delta.id: delta for _ in range(200) if core.busy for delta in core.step() if delta.finish}
        assert llm.stats().num_preemptions > 0
        from octavo.features.pooling.requests import pooled_output

        for request in asked:
            found = pooled_output(news[request.id]).pooled.values()
            expected = states(model, request.tokens).mean(0)
            np.testing.assert_allclose(found, expected, atol=3e-5, rtol=1e-4)


def test_a_generating_model_does_both(checkpoint: tuple[Path, Any]) -> None:
    folder, model = checkpoint
    with LLM(str(folder), dtype="float32", kv_cache_memory_bytes=2 << 20, threads=1) as llm:
        assert llm.info.tasks == ["generate", "embed", "token_embed"]
        text = llm.generate([[5, 6, 7]], SamplingParams(max_tokens=4, temperature=0))[0].outputs[0].token_ids
        vector = llm.embed([[5, 6, 7]])[0].outputs.embedding
        again = llm.generate([[5, 6, 7]], SamplingParams(max_tokens=4, temperature=0))[0].outputs[0].token_ids
        tokens = llm.encode([[5, 6, 7]], normalize=False)[0].outputs.data
        array = llm.encode([[5, 6, 7]], normalize=False, convert_to_numpy=True)[0].outputs.data
        whole = llm.encode([[5, 6, 7]], pooling_task="embed", convert_to_numpy=True)[0].outputs.data
    assert isinstance(array, np.ndarray)
    assert array.dtype == np.float32
    assert array.tolist() == tokens
    assert isinstance(whole, np.ndarray)
    assert whole.tolist() == vector
    hidden = states(model, [5, 6, 7])
    np.testing.assert_allclose(vector, hidden[-1] / np.linalg.norm(hidden[-1]), atol=2e-6)
    np.testing.assert_allclose(tokens, hidden, atol=3e-5, rtol=1e-4)
    assert text == again


def test_a_model_without_a_head_only_makes_vectors(tmp_path: Path) -> None:
    """Its tensors bear no root, as in checkpoints of embedding models."""
    folder, model = make(tmp_path, transformers.Qwen3Model)
    settings = {"dtype": "float32", "kv_cache_memory_bytes": 2 << 20, "threads": 1}
    with LLM(str(folder), **settings) as llm:
        assert llm.info.tasks == ["embed", "token_embed"]
        vector = llm.embed([[5, 6, 7]], normalize=False)[0].outputs.embedding
        with pytest.raises(InvalidRequestError, match="does not generate text"):
            llm.generate([[5, 6, 7]])
    np.testing.assert_allclose(vector, states(model, [5, 6, 7])[-1], atol=3e-5, rtol=1e-4)
    with pytest.raises(ConfigError, match="--runner generate"):
        LLM(str(folder), runner="generate", **settings)


def test_the_pooling_runner_generates_nothing(checkpoint: tuple[Path, Any]) -> None:
    folder, _ = checkpoint
    for choice in ({"runner": "pooling"}, {"convert": "embed"}):
        with LLM(str(folder), kv_cache_memory_bytes=2 << 20, threads=1, **choice) as llm:
            assert "generate" not in llm.info.tasks
            assert len(llm.embed([[5]])[0].outputs.embedding) == 64
