"""Encoders and their heads against Transformers, on tiny random checkpoints, through the whole engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import toy_tokenizers
import transformers
from safetensors.torch import save_file
from tiny import vary_vectors

from octavo import LLM
from octavo.core.errors import InvalidRequestError
from octavo.features.pooling.params import pooler_info

_BERT = {
    "vocab_size": 61,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 80,
    "max_position_embeddings": 40,
    "initializer_range": 0.3,
}
_DISTIL = {
    "vocab_size": 61,
    "dim": 48,
    "n_layers": 2,
    "n_heads": 4,
    "hidden_dim": 80,
    "max_position_embeddings": 40,
    "initializer_range": 0.3,
}
_MODERN = {
    **_BERT,
    "num_hidden_layers": 4,
    "local_attention": 8,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
    "cls_token_id": None,
    "sep_token_id": None,
}
FAMILIES: dict[str, tuple[Any, dict[str, Any]]] = {
    "bert": (transformers.BertConfig, _BERT),
    "bert-tanh-gelu": (transformers.BertConfig, {**_BERT, "hidden_act": "gelu_new", "type_vocab_size": 1}),
    "roberta": (transformers.RobertaConfig, {**_BERT, "max_position_embeddings": 42, "hidden_act": "relu"}),
    "xlm-roberta": (transformers.XLMRobertaConfig, {**_BERT, "type_vocab_size": 1, "pad_token_id": 0}),
    "distilbert": (transformers.DistilBertConfig, _DISTIL),
    "modernbert": (transformers.ModernBertConfig, _MODERN),
    "modernbert-biases": (
        transformers.ModernBertConfig,
        {**_MODERN, "norm_bias": True, "attention_bias": True, "mlp_bias": True, "classifier_pooling": "mean"},
    ),
}
FAMILIES["nomic"] = (transformers.NomicBertConfig, {**_BERT, "type_vocab_size": 2})
LENGTHS = (1, 7, 3, 36, 7, 20)


def make(family: str, folder: Path, head: str = "", **more: Any) -> Any:
    """A random checkpoint with a tokenizer; the Transformers model, all of whose numbers matter."""
    config_class, settings = FAMILIES[family]
    torch.manual_seed(len(family))
    config = config_class(**{**settings, **more})
    auto = transformers.AutoModelForSequenceClassification if head == "labels" else transformers.AutoModel
    auto = transformers.AutoModelForMaskedLM if head == "masked" else auto
    model = auto.from_config(config, dtype=torch.float32).eval()
    vary_vectors(model)
    model.save_pretrained(folder)
    toy_tokenizers.bert().save(str(folder / "tokenizer.json"))
    return model


def prompts(seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(4, 57, size).tolist() for size in LENGTHS]


def states(model: Any, tokens: list[int], **inputs: Any) -> np.ndarray:
    with torch.no_grad():
        return model(torch.tensor([tokens]), **inputs).last_hidden_state[0].numpy()


@pytest.mark.parametrize("family", FAMILIES)
def test_hidden_states_equal_those_of_transformers(family: str, tmp_path: Path) -> None:
    """Several steps, in which sequences of different and of equal lengths lie side by side."""
    model = make(family, tmp_path)
    with LLM(str(tmp_path), max_num_batched_tokens=48, threads=1) as llm:
        found = llm.encode(prompts(), normalize=False)
        longest = llm.info.max_model_len
        steps = llm.stats().num_steps
    assert steps == 2
    expected_length = {"roberta": 40, "xlm-roberta": 39}.get(family, 40)
    assert longest == expected_length
    for tokens, one in zip(prompts(), found, strict=True):
        np.testing.assert_allclose(np.array(one.outputs.data), states(model, tokens), atol=5e-5)


@pytest.mark.parametrize("pooling", ["MEAN", "CLS", "LAST"])
def test_pooling_is_what_it_is_called(pooling: str, tmp_path: Path) -> None:
    model = make("bert", tmp_path)
    with LLM(str(tmp_path), pooler_config={"pooling_type": pooling}, threads=1) as llm:
        found = llm.embed(prompts(), normalize=False)
        unit = llm.embed(prompts())
    for tokens, one, other in zip(prompts(), found, unit, strict=True):
        hidden = states(model, tokens)
        expected = {"MEAN": hidden.mean(0), "CLS": hidden[0], "LAST": hidden[-1]}[pooling]
        np.testing.assert_allclose(one.outputs.embedding, expected, atol=5e-5)
        np.testing.assert_allclose(other.outputs.embedding, expected / np.linalg.norm(expected), atol=2e-6)


DENSE: list[dict[str, Any]] = [
    {"out_features": 20, "bias": True, "activation_function": "torch.nn.modules.activation.Tanh"},
    {"out_features": 32, "bias": False, "activation_function": "torch.nn.modules.linear.Identity"},
    {"out_features": 12, "bias": True, "activation_function": "torch.nn.modules.activation.GELU"},
]


def add_modules(folder: Path, dense: list[dict[str, Any]], size: int) -> list[dict[str, torch.Tensor]]:
    """modules.json with a mean, these dense layers and a normalization; the layers' weights."""
    kinds = ["Transformer", "Pooling", *["Dense"] * len(dense), "Normalize"]
    paths = ["", *(f"{place}_{kind}" for place, kind in enumerate(kinds) if place)]
    listed = [
        {"path": path, "type": f"sentence_transformers.models.{kind}"} for path, kind in zip(paths, kinds, strict=True)
    ]
    (folder / "modules.json").write_text(json.dumps(listed))
    for path in paths[1:]:
        (folder / path).mkdir()
    (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode_mean_tokens": true}')
    weights = []
    for place, layer in enumerate(dense, start=2):
        tensors = {"linear.weight": torch.randn(layer["out_features"], size) * 0.2}
        if layer["bias"]:
            tensors["linear.bias"] = torch.randn(layer["out_features"])
        (folder / paths[place] / "config.json").write_text(json.dumps(layer | {"in_features": size}))
        save_file(tensors, folder / paths[place] / "model.safetensors")
        weights.append(tensors)
        size = layer["out_features"]
    return weights


def through(vector: np.ndarray, weights: list[dict[str, torch.Tensor]]) -> np.ndarray:
    """Each layer's product, bias and activation, then length 1."""
    x = torch.from_numpy(vector)
    for layer, tensors in zip(DENSE, weights, strict=True):
        x = tensors["linear.weight"] @ x + tensors.get("linear.bias", 0.0)
        name = layer["activation_function"].rpartition(".")[2]
        x = {"Tanh": torch.tanh, "Identity": torch.nn.Identity(), "GELU": torch.nn.functional.gelu}[name](x)
    return (x / x.norm()).numpy()


def test_dense_layers_stand_between_pooling_and_normalization(tmp_path: Path) -> None:
    """As sentence-transformers computes them; vectors of tokens go without."""
    model = make("bert", tmp_path, is_matryoshka=True)
    weights = add_modules(tmp_path, DENSE, 48)
    with LLM(str(tmp_path), max_num_batched_tokens=48, threads=1) as llm:
        pooler = pooler_info(llm.info)
        assert pooler is not None
        assert pooler.size == 12
        found = llm.embed(prompts())
        cut = llm.embed(prompts(), dimensions=5)
        tokens_found = llm.encode(prompts(), normalize=False)
        scores = llm.score("ab", ["a dog", "what"])
        pair = [llm.embed(text)[0].outputs.embedding for text in ("ab", "what")]
    for tokens, one, short, each in zip(prompts(), found, cut, tokens_found, strict=True):
        hidden = states(model, tokens)
        expected = through(hidden.mean(0), weights)
        np.testing.assert_allclose(one.outputs.embedding, expected, atol=5e-6)
        np.testing.assert_allclose(short.outputs.embedding, expected[:5] / np.linalg.norm(expected[:5]), atol=5e-5)
        np.testing.assert_allclose(np.array(each.outputs.data), hidden, atol=5e-5)
    np.testing.assert_allclose(scores[1].outputs.score, np.dot(*pair), atol=1e-5)


@pytest.mark.parametrize("family", ["bert", "roberta", "distilbert", "modernbert", "modernbert-biases"])
@pytest.mark.parametrize("labels", [1, 3])
def test_heads_equal_those_of_transformers(family: str, labels: int, tmp_path: Path) -> None:
    model = make(family, tmp_path, head="labels", num_labels=labels)
    with LLM(str(tmp_path), threads=1) as llm:
        found = llm.classify(prompts())
    for tokens, one in zip(prompts(), found, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([tokens])).logits[0]
        expected = logits.sigmoid() if labels == 1 else logits.softmax(-1)
        np.testing.assert_allclose(one.outputs.probs, expected.numpy(), atol=1e-5)


@pytest.mark.parametrize("family", ["bert", "xlm-roberta"])
def test_a_cross_encoder_reads_two_texts_as_one(family: str, tmp_path: Path) -> None:
    """With token types where the model knows more than one; an activation of its authors' choice."""
    model = make(family, tmp_path, head="labels", num_labels=1)
    config = json.loads((tmp_path / "config.json").read_text())
    config["sentence_transformers"] = {"activation_fn": "torch.nn.modules.linear.Identity"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    tokenizer = toy_tokenizers.bert()
    documents = ["ab, cd.", "a", "what is a dog."]
    with LLM(str(tmp_path), threads=1) as llm:
        scores = llm.score("the dog", documents)
        cut = llm.score("abcdefgh", ["ijklmnopq"], truncate_prompt_tokens=11)
        with pytest.raises(InvalidRequestError, match="maximum context length"):
            llm.score("a" * 30, "b" * 30)
    for document, one in zip(documents, scores, strict=True):
        pair = tokenizer.encode("the dog", document)
        types = {"token_type_ids": torch.tensor([pair.type_ids])} if family == "bert" else {}
        assert one.prompt_token_ids == pair.ids
        with torch.no_grad():
            expected = model(torch.tensor([pair.ids]), **types).logits.item()
        assert one.outputs.score == pytest.approx(expected, abs=2e-5)
    assert cut[0].prompt_token_ids == tokenizer.encode("abcd", "ijkl").ids


def test_several_labels_are_no_score(tmp_path: Path) -> None:
    make("bert", tmp_path, head="labels", num_labels=3)
    with LLM(str(tmp_path), threads=1) as llm, pytest.raises(InvalidRequestError, match="3 labels"):
        llm.score("a", "b")


@pytest.mark.parametrize("old_norms", [False, True])
def test_a_checkpoint_for_training_serves_its_encoder(tmp_path: Path, old_norms: bool, caplog: Any) -> None:
    """Its names have a root, it has a head that nobody needs; the oldest call a norm's weights gamma and beta."""
    model = make("bert", tmp_path, head="masked")
    if old_norms:
        import safetensors.torch

        path = tmp_path / "model.safetensors"
        tensors = safetensors.torch.load_file(path)
        for name in [name for name in tensors if "LayerNorm" in name]:
            renamed = name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")
            tensors[renamed] = tensors.pop(name)
        safetensors.torch.save_file(tensors, path, metadata={"format": "pt"})
    with LLM(str(tmp_path), threads=1) as llm:
        found = llm.encode(prompts(), normalize=False)
    for tokens, one in zip(prompts(), found, strict=True):
        np.testing.assert_allclose(np.array(one.outputs.data), states(model.bert, tokens), atol=5e-5)
    assert "not used" not in caplog.text


def test_what_an_encoder_can_not_do_is_said(tmp_path: Path) -> None:
    make("bert", tmp_path)
    with LLM(str(tmp_path), threads=1) as llm:
        for ask in (lambda: llm.generate("a"), lambda: llm.chat([{"role": "user", "content": "a"}])):
            with pytest.raises(InvalidRequestError, match="makes embeddings and does not generate text"):
                ask()
        with pytest.raises(InvalidRequestError, match="no classification head"):
            llm.classify("a")
