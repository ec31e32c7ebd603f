"""Classification heads of decoders against Transformers: labels, rewards, and scores of pairs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import toy_tokenizers
from tiny import load_model, make_classifier, model_files

from octavo import LLM
from octavo.core.errors import ConfigError, OctavoError
from octavo.features.pooling.api import PoolingParams
from octavo.nn.attention.reference import ReferenceAttention

TEXT = ["The quick brown fox jumps over the lazy dog.", "A token.", "of a word; words are pieces of a sentence. " * 4]
SETTINGS = {"max_num_batched_tokens": 24, "max_num_seqs": 4, "kv_cache_memory_bytes": 2 << 20, "threads": 1}


def make(folder: Path, family: str, labels: int) -> tuple[str, Any]:
    model = make_classifier(family, folder, labels, {"vocab_size": 440, "pad_token_id": None})
    toy_tokenizers.byte_level().save(str(folder / "tokenizer.json"))
    return str(folder), model


def logits_of(model: Any, tokens: list[int]) -> np.ndarray:
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0].numpy()


@pytest.mark.parametrize("family", ["gemma2", "gpt-neox", "gpt2", "llama", "phi", "qwen2", "qwen3"])
def test_the_head_of_any_family(family: str, tmp_path: Path) -> None:
    """The loader leaves no tensor of the checkpoint unread."""
    theirs = make_classifier(family, tmp_path, 3)
    ours = load_model(model_files(tmp_path), ReferenceAttention())
    states = torch.randn(5, ours.spec.hidden_size)
    torch.testing.assert_close(ours.classify(states), states @ theirs.score.weight.T)


@pytest.mark.parametrize("backend", ["native", "torch"])
def test_labels_of_prompts_in_chunks(tmp_path: Path, backend: str) -> None:
    folder, model = make(tmp_path, "llama", 3)
    with LLM(folder, dtype="float32", attention_backend=backend, **SETTINGS) as llm:
        for one in llm.classify(TEXT):
            expected = torch.from_numpy(logits_of(model, one.prompt_token_ids)).softmax(-1)
            np.testing.assert_allclose(one.outputs.probs, expected, atol=2e-5)
        with pytest.raises(OctavoError):
            llm.generate("The")


def test_rewards_and_scores_of_pairs(tmp_path: Path) -> None:
    folder, model = make(tmp_path, "qwen3", 1)
    with LLM(folder, dtype="float32", **SETTINGS) as llm:
        for one in llm.classify(TEXT, pooling_params=PoolingParams(use_activation=False)):
            np.testing.assert_allclose(one.outputs.probs, logits_of(model, one.prompt_token_ids), atol=2e-4, rtol=1e-4)
        (score,) = llm.score("The quick brown fox", ["jumps over the lazy dog"])
        expected = torch.from_numpy(logits_of(model, score.prompt_token_ids)).sigmoid()
        assert score.outputs.score == pytest.approx(expected.item(), abs=2e-5)


def test_a_classifier_generates_no_text(tmp_path: Path) -> None:
    folder, _ = make(tmp_path, "llama", 2)
    with pytest.raises(ConfigError, match="no head that could generate text"):
        LLM(folder, runner="generate", **SETTINGS)
