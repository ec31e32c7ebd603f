"""Classification heads of decoders against Transformers: labels, rewards, and scores of pairs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import toy_tokenizers
from tiny import load_model, make_checkpoint, make_classifier, model_files

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


@pytest.mark.parametrize("family", ["gemma2", "gemma3", "gpt-neox", "gpt2", "llama", "phi", "qwen2", "qwen3"])
def test_the_head_of_any_family(family: str, tmp_path: Path) -> None:
    """The loader leaves no tensor of the checkpoint unread."""
    theirs = make_classifier(family, tmp_path, 3)
    ours = load_model(model_files(tmp_path), ReferenceAttention())
    states = torch.randn(5, ours.spec.hidden_size)
    torch.testing.assert_close(ours.classify(states), states @ theirs.score.weight.T)


@pytest.mark.parametrize("backend", ["native", "torch"])
def test_labels_of_prompts_in_chunks(tmp_path: Path, backend: str) -> None:
    folder, model = make(tmp_path, "llama", 3)
    with LLM(folder, device="cpu", dtype="float32", attention_backend=backend, **SETTINGS) as llm:
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


@pytest.mark.parametrize("tied", [True, False])
def test_a_reranker_that_answers_yes_or_no(tied: bool, tmp_path: Path) -> None:
    """Its score is the probability of the second token among the two, as Qwen3-Reranker's authors compute it."""
    model = make_checkpoint("qwen3", tmp_path, {"vocab_size": 440, "pad_token_id": None, "tie_word_embeddings": tied})
    tokenizer = toy_tokenizers.byte_level()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    no, yes = (tokenizer.token_to_id(token) for token in "ny")
    changes = {"architectures": ["Qwen3ForSequenceClassification"], "is_original_qwen3_reranker": True}
    for tokens in (["n", "y"], [no, yes]):
        with LLM(
            str(tmp_path), dtype="float32", hf_overrides={**changes, "classifier_from_token": tokens}, **SETTINGS
        ) as llm:
            (score,) = llm.score("The quick brown fox", ["jumps over the lazy dog"])
        logits = logits_of(model, score.prompt_token_ids)[-1]
        assert score.outputs.score == pytest.approx(float(1 / (1 + np.exp(logits[no] - logits[yes]))), abs=2e-5)


def test_tokens_that_a_reranker_lacks_are_named(tmp_path: Path) -> None:
    make(tmp_path, "qwen3", 1)
    for tokens, says in (["maybe", "yes"], "has no token 'maybe'"), ("yes", "a list of one or two tokens"):
        changes = {"architectures": ["Qwen3ForSequenceClassification"], "classifier_from_token": tokens}
        with pytest.raises(ConfigError, match=says):
            LLM(str(tmp_path), hf_overrides=changes, **SETTINGS)


def test_a_classifier_generates_no_text(tmp_path: Path) -> None:
    folder, _ = make(tmp_path, "llama", 2)
    with pytest.raises(ConfigError, match="no head that could generate text"):
        LLM(folder, runner="generate", **SETTINGS)
