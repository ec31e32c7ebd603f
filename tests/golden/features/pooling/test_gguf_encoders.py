"""Encoders in GGUF files, as llama.cpp's converter writes them, against Transformers: vectors and scores."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from gguf_kit import write_model
from tiny import make_checkpoint

from octavo import LLM
from octavo.core.errors import ConfigError, ModelFileError

PROMPTS = [[5, 9, 33], [7, 8, 50, 12, 44, 3, 21], [60]]
_SIZES = {
    "vocab_size": 61,
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 80,
    "max_position_embeddings": 40,
    "initializer_range": 0.3,
}
_DISTIL = {"vocab_size": 61, "dim": 48, "n_layers": 2, "n_heads": 4, "hidden_dim": 80, "max_position_embeddings": 40}
CONFIGS: dict[str, tuple[Any, dict[str, Any], int]] = {
    "bert": (transformers.BertConfig, _SIZES, 0),
    "xlm-roberta": (transformers.XLMRobertaConfig, {**_SIZES, "type_vocab_size": 1, "pad_token_id": 1}, 2),
    "distilbert": (transformers.DistilBertConfig, {**_DISTIL, "initializer_range": 0.3}, 0),
}
"""Family -> configuration, and positions in front of the first one."""


def make(family: str, path: Path, kind: Any = transformers.AutoModel, **metadata: Any) -> Any:
    """Write a random model, and return it as Transformers'."""
    config_class, settings, offset = CONFIGS[family]
    torch.manual_seed(len(family))
    config = config_class(**settings)
    config.num_labels = 1
    model = kind.from_config(config, dtype=torch.float32).eval()
    writer = gguf.GGUFWriter(path, "bert")
    writer.add_file_type(0)
    writer.add_block_count(2)
    writer.add_context_length(config.max_position_embeddings - offset)
    writer.add_embedding_length(48)
    writer.add_feed_forward_length(80)
    writer.add_head_count(4)
    writer.add_layer_norm_eps(getattr(config, "layer_norm_eps", 1e-12))
    writer.add_causal_attention(False)
    for key, value in metadata.items():
        writer.add_uint32(f"bert.{key}", value)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.BERT, 2)
    for name, tensor in model.state_dict().items():
        with torch.no_grad():
            tensor.add_(torch.randn_like(tensor) * 0.1)
        if "pooler" in name:
            continue
        if offset and "position_embeddings" in name:
            tensor = tensor[offset:]
        inner = name.removeprefix("roberta.")
        found = names.get_name(inner, try_suffixes=(".weight", ".bias"))
        assert found is not None, name
        writer.add_tensor(found, tensor.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def states(model: Any, tokens: list[int]) -> np.ndarray:
    with torch.no_grad():
        return model(torch.tensor([tokens])).last_hidden_state[0].numpy()


@pytest.mark.parametrize("family", CONFIGS)
def test_vectors_from_a_file(family: str, tmp_path: Path) -> None:
    """`pooling_type` 1 is the mean; 0 says nothing, and the first token's state is taken."""
    for pooling in (0, 1):
        path = tmp_path / f"{pooling}.gguf"
        model = make(family, path, pooling_type=pooling)
        with LLM(str(path), skip_tokenizer_init=True, threads=1, pooler_config={"normalize": False}) as llm:
            for tokens, one in zip(PROMPTS, llm.embed(PROMPTS), strict=True):
                hidden = states(model, tokens)
                expected = hidden.mean(0) if pooling else hidden[0]
                np.testing.assert_allclose(one.outputs.embedding, expected, atol=2e-5, rtol=1e-4)


def test_scores_of_a_reranker(tmp_path: Path) -> None:
    path = tmp_path / "reranker.gguf"
    model = make("xlm-roberta", path, transformers.AutoModelForSequenceClassification, pooling_type=4)
    with LLM(str(path), skip_tokenizer_init=True, threads=1) as llm:
        for tokens, one in zip(PROMPTS, llm.classify(PROMPTS), strict=True):
            with torch.no_grad():
                expected = model(torch.tensor([tokens])).logits[0].sigmoid()
            np.testing.assert_allclose(one.outputs.probs, expected, atol=2e-5)


@pytest.mark.parametrize("tensor", ["cls.output.weight", "cls.weight"])
def test_a_head_that_lacks_a_layer_is_refused(tmp_path: Path, tensor: str) -> None:
    """Otherwise a reranker would answer with cosines of what its head was trained to read."""
    path = write_small(tmp_path, "bert", ["token_embd.weight", tensor], {})
    with pytest.raises(ModelFileError, match="one of the two layers"):
        LLM(str(path), skip_tokenizer_init=True)


def test_a_reranker_without_a_head_is_refused(tmp_path: Path) -> None:
    make("bert", tmp_path / "a.gguf", pooling_type=4)
    with pytest.raises(ConfigError, match="holds a reranker"):
        LLM(str(tmp_path / "a.gguf"), skip_tokenizer_init=True)


def test_decoders_that_attend_in_both_directions_are_refused(tmp_path: Path) -> None:
    both = write_small(tmp_path, "qwen3", ["token_embd.weight"], {"attention.causal": False})
    with pytest.raises(ModelFileError, match=r"qwen3\.attention\.causal is False"):
        LLM(str(both), skip_tokenizer_init=True)


def test_a_reranker_that_answers_with_a_token(tmp_path: Path) -> None:
    """By itself it would answer with cosines; as a classifier of its two tokens it scores as its authors publish it."""
    model, path = make_checkpoint("qwen3", tmp_path), tmp_path / "reranker.gguf"
    write_model(path, model, "qwen3", pooling_type=4)
    settings = {"skip_tokenizer_init": True, "dtype": "float32", "threads": 1, "kv_cache_memory_bytes": 2 << 20}
    with pytest.raises(ConfigError, match=r'"Qwen3ForSequenceClassification"\], "classifier_from_token": \[NO, YES\]'):
        LLM(str(path), **settings)
    told = {"architectures": ["Qwen3ForSequenceClassification"], "classifier_from_token": [5, 9]}
    with LLM(str(path), hf_overrides=told, **settings) as llm:
        found = [one.outputs.probs for one in llm.classify(PROMPTS)]
    for tokens, probs in zip(PROMPTS, found, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([tokens])).logits[0, -1]
        np.testing.assert_allclose(probs, [logits[[5, 9]].softmax(-1)[1]], atol=2e-5)


def write_small(folder: Path, arch: str, tensors: list[str], keys: dict[str, Any]) -> Path:
    """Write a file with metadata that suffices to read its architecture."""
    path = folder / "small.gguf"
    writer = gguf.GGUFWriter(path, arch)
    for add in (writer.add_block_count, writer.add_context_length, writer.add_embedding_length):
        add(8)
    writer.add_feed_forward_length(8)
    writer.add_head_count(2)
    writer.add_layer_norm_eps(1e-12)
    writer.add_layer_norm_rms_eps(1e-6)
    for key, value in keys.items():
        (writer.add_bool if isinstance(value, bool) else writer.add_uint32)(f"{arch}.{key}", value)
    for name in tensors:
        writer.add_tensor(name, np.zeros((4, 8), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
