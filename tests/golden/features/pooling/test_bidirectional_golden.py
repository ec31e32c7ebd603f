"""Decoders whose tokens attend to later ones, too, against Transformers on tiny random checkpoints: EmbeddingGemma as
its authors lay it out, and decoders with `is_causal` false."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import toy_tokenizers
import transformers
from test_encoders_golden import add_modules, states
from tiny import vary_vectors

from octavo import LLM
from octavo.core.errors import InvalidRequestError
from octavo.features.pooling.params import pooler_info

_COMMON = {
    "vocab_size": 440,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
_GEMMA = {
    **_COMMON,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "query_pre_attn_scalar": 24,
    "sliding_window": 12,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
        "full_attention": {"rope_type": "default", "rope_theta": 1000.0},
    },
    "use_bidirectional_attention": True,
}
_QWEN = {**_COMMON, "num_attention_heads": 4, "num_key_value_heads": 2, "is_causal": False}
DENSE: list[dict[str, Any]] = [
    {"out_features": 96, "bias": False, "activation_function": "torch.nn.modules.linear.Identity"},
    {"out_features": 40, "bias": False, "activation_function": "torch.nn.modules.linear.Identity"},
]
LENGTHS = (1, 7, 3, 90, 7, 41, 120)
"""Shorter and longer than the window; two are equal."""
SETTINGS: dict[str, Any] = {"max_num_batched_tokens": 128, "threads": 1}


def make(kind: Any, config: Any, folder: Path) -> Any:
    """A random checkpoint with a tokenizer; the Transformers model, all of whose numbers matter."""
    torch.manual_seed(7)
    config._attn_implementation = "eager"
    model = kind(config).eval()
    vary_vectors(model)
    model.save_pretrained(folder)
    toy_tokenizers.byte_level().save(str(folder / "tokenizer.json"))
    return model


def gemma(folder: Path, kind: Any = transformers.Gemma3TextModel, **changes: Any) -> Any:
    return make(kind, transformers.Gemma3TextConfig(**{**_GEMMA, **changes}), folder)


def prompts() -> list[list[int]]:
    rng = np.random.default_rng(2)
    return [rng.integers(5, 390, size).tolist() for size in LENGTHS]


@pytest.mark.parametrize("window", [2, 12, 13, 300])
def test_windows_reach_as_far_ahead_as_back(window: int, tmp_path: Path) -> None:
    """The configuration counts the tokens on both sides."""
    model = gemma(tmp_path, sliding_window=window)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"sliding_window": window}))
    with LLM(str(tmp_path), **SETTINGS) as llm:
        found = llm.encode(prompts(), normalize=False)
        assert llm.info.tasks == ["embed", "token_embed"]
    for tokens, one in zip(prompts(), found, strict=True):
        np.testing.assert_allclose(np.array(one.outputs.data), states(model, tokens), atol=5e-5)


def test_a_folder_as_sentence_transformers_lays_it_out(tmp_path: Path) -> None:
    """The mean, two dense layers, length 1; shorter vectors; a prompt in front of texts. All at once and one by one."""
    model = gemma(tmp_path)
    weights = add_modules(tmp_path, DENSE, 48)
    settings = {"prompts": {"query": "task: search result | query: "}, "default_prompt_name": "query"}
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps(settings))
    (tmp_path / "sentence_bert_config.json").write_text('{"max_seq_length": 100}')
    texts = ["a", "which planet is red", "Mars is red. " * 5]
    tokenizer = toy_tokenizers.byte_level()
    with LLM(str(tmp_path), pooler_config={"matryoshka_dimensions": [16, 24]}, **SETTINGS) as llm:
        pooler = pooler_info(llm.info)
        assert pooler is not None
        assert (pooler.size, pooler.pooling, llm.info.max_model_len) == (40, "mean", 100)
        found = llm.embed(texts)
        alone = [llm.embed(text)[0].outputs.embedding for text in texts]
        cut = llm.embed(texts, dimensions=16)
        with pytest.raises(InvalidRequestError, match="16"):
            llm.embed(texts, dimensions=17)
        with pytest.raises(InvalidRequestError, match="does not generate text"):
            llm.generate(texts)
    for text, one, short, same in zip(texts, found, cut, alone, strict=True):
        tokens = tokenizer.encode(settings["prompts"]["query"] + text).ids
        assert one.prompt_token_ids == tokens
        assert len(tokens) > _GEMMA["sliding_window"]
        vector = states(model, tokens).mean(0)
        for layer in weights:
            vector = layer["linear.weight"].numpy() @ vector
        np.testing.assert_allclose(one.outputs.embedding, vector / np.linalg.norm(vector), atol=5e-6)
        np.testing.assert_allclose(same, one.outputs.embedding, atol=2e-6)
        np.testing.assert_allclose(short.outputs.embedding, vector[:16] / np.linalg.norm(vector[:16]), atol=1e-5)


def test_without_a_stated_pooling_it_is_the_mean(tmp_path: Path) -> None:
    model = gemma(tmp_path)
    with LLM(str(tmp_path), **SETTINGS) as llm:
        found = llm.embed(prompts(), normalize=False)
    for tokens, one in zip(prompts(), found, strict=True):
        np.testing.assert_allclose(one.outputs.embedding, states(model, tokens).mean(0), atol=5e-5)


def test_labels_are_made_of_the_last_token(tmp_path: Path) -> None:
    """As Transformers' classifiers of decoders do."""
    model = gemma(tmp_path, transformers.Gemma3TextForSequenceClassification, num_labels=3)
    with LLM(str(tmp_path), **SETTINGS) as llm:
        found = llm.classify(prompts())
    for tokens, one in zip(prompts(), found, strict=True):
        with torch.no_grad():
            expected = model(torch.tensor([tokens])).logits[0].softmax(-1).numpy()
        np.testing.assert_allclose(one.outputs.probs, expected, atol=2e-5)


@pytest.mark.parametrize("tied", [False, True])
def test_a_decoder_that_is_not_causal(tied: bool, tmp_path: Path, caplog: Any) -> None:
    """Its checkpoint has the language model's head, which nothing needs."""
    config = transformers.Qwen2Config(**_QWEN, tie_word_embeddings=tied)
    model = make(transformers.Qwen2ForCausalLM, config, tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["is_causal"] is False
    with LLM(str(tmp_path), pooler_config={"pooling_type": "LAST"}, **SETTINGS) as llm:
        found = llm.encode(prompts(), normalize=False)
        last = llm.embed(prompts(), normalize=False)
    for tokens, one, vector in zip(prompts(), found, last, strict=True):
        expected = states(model.model, tokens)
        np.testing.assert_allclose(np.array(one.outputs.data), expected, atol=5e-5)
        np.testing.assert_allclose(vector.outputs.embedding, expected[-1], atol=5e-5)
    assert "not used" not in caplog.text
