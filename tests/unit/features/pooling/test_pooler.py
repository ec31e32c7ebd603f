"""What checkpoints say of their vectors, in the forms in which they say it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from octavo.core.errors import ConfigError, ModelFileError
from octavo.features.pooling.checkpoint import dense_layers, pooler_of
from octavo.features.pooling.params import PoolerInfo
from octavo.hub.files import ModelFiles
from octavo.hub.sentence_transformers import is_sentence_transformer, max_sequence_length


def checkpoint(folder: Path, *modules: str, config: dict[str, Any] | None = None, **pooling: Any) -> ModelFiles:
    """A folder with modules.json, if any are given, and the configuration of its pooling."""
    if modules:
        listed = [
            {"idx": i, "path": f"{i}_{kind}" if i else "", "type": f"sentence_transformers.models.{kind}"}
            for i, kind in enumerate(modules)
        ]
        (folder / "modules.json").write_text(json.dumps(listed))
        (folder / "1_Pooling").mkdir()
        (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    return ModelFiles(name="m", path=folder, format="safetensors", weights=(), config=config or {})


def pooler(files: ModelFiles, labels: int = 0, **override: Any) -> PoolerInfo:
    return pooler_of(files, override, size=8, default="cls", labels=labels)


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}, "mean"),
        ({"pooling_mode_cls_token": True}, "cls"),
        ({"pooling_mode_lasttoken": True}, "last"),
        ({"pooling_mode": "mean"}, "mean"),
        ({"pooling_mode": "lasttoken"}, "last"),
        ({"pooling_mode": ["cls"]}, "cls"),
        ({"word_embedding_dimension": 8}, "mean"),
    ],
)
def test_the_pooling_is_that_of_the_checkpoint(tmp_path: Path, mode: dict[str, Any], expected: str) -> None:
    files = checkpoint(tmp_path, "Transformer", "Pooling", **mode)
    assert is_sentence_transformer(files)
    found = pooler(files)
    assert (found.pooling, found.normalize) == (expected, False)


def test_vectors_have_length_one_if_the_checkpoint_says_so_or_says_nothing(tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    plain.mkdir()
    assert pooler(checkpoint(plain)) == PoolerInfo(pooling="cls", normalize=True, size=8)
    assert pooler(checkpoint(tmp_path, "Transformer", "Pooling", "Normalize", pooling_mode="mean")).normalize


def test_the_users_word_comes_last(tmp_path: Path) -> None:
    files = checkpoint(tmp_path, "Transformer", "Pooling", "Normalize", pooling_mode_mean_tokens=True)
    found = pooler(files, pooling_type="LAST", normalize=False, matryoshka_dimensions=[4, 2])
    assert (found.pooling, found.normalize, found.matryoshka) == ("last", False, [2, 4])
    assert pooler(files, is_matryoshka=True).matryoshka == []
    assert (found.task, pooler(files, task="token_embed").task) == ("embed", "token_embed")


@pytest.mark.parametrize(
    "mode",
    [
        {"pooling_mode_max_tokens": True},
        {"pooling_mode": ["mean", "max"]},
        {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True},
    ],
)
def test_another_pooling_is_refused_unless_the_user_chooses(tmp_path: Path, mode: dict[str, Any]) -> None:
    files = checkpoint(tmp_path, "Transformer", "Pooling", **mode)
    with pytest.raises(ConfigError, match=r"Octavo supports mean, cls and last.*--pooler-config"):
        pooler(files)
    assert pooler(files, pooling_type="CLS").pooling == "cls"


def test_a_module_that_is_not_known_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"module LSTM.*Transformer, Pooling, Dense, Normalize"):
        pooler(checkpoint(tmp_path, "Transformer", "Pooling", "LSTM", pooling_mode="mean"))


def dense(tmp_path: Path, *modules: str, weights: bool = True, **config: Any) -> ModelFiles:
    """A checkpoint with the dense layer 2_Dense."""
    files = checkpoint(tmp_path, *(modules or ("Transformer", "Pooling", "Dense", "Normalize")), pooling_mode="mean")
    (tmp_path / "2_Dense").mkdir()
    (tmp_path / "2_Dense" / "config.json").write_text(json.dumps({"in_features": 8, "out_features": 3, **config}))
    if weights:
        (tmp_path / "2_Dense" / "model.safetensors").touch()
    return files


def test_a_dense_layer_makes_the_vectors_of_its_size(tmp_path: Path) -> None:
    files = dense(tmp_path, "Transformer", "Pooling", "Dense", "Dropout", "Normalize", is_matryoshka=True)
    assert pooler(files) == PoolerInfo(pooling="mean", normalize=True, size=3)
    (layer,) = dense_layers(files, 8)
    assert (layer.inputs, layer.outputs, layer.bias, layer.activation) == (8, 3, True, "tanh")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"activation_function": "torch.nn.modules.activation.CELU"}, r"activation.*CELU; Octavo has identity, tanh"),
        ({"use_residual": True}, "sets use_residual=True, which Octavo does not have"),
        ({"module_input_name": "token_embeddings"}, "module_input_name"),
        ({"in_features": 7}, "maps 7 elements to 3, but gets 8"),
        ({"out_features": None}, "maps 8 elements to None"),
        ({"weights": False}, r"model\.safetensors is missing.*pytorch_model\.bin"),
    ],
)
def test_a_dense_layer_that_can_not_be_is_named(tmp_path: Path, config: dict[str, Any], message: str) -> None:
    with pytest.raises((ConfigError, ModelFileError), match=rf"2_Dense.*{message}"):
        pooler(dense(tmp_path, **config))


def test_modules_in_another_order_are_refused(tmp_path: Path) -> None:
    files = checkpoint(tmp_path, "Transformer", "Pooling", "Normalize", "Dense", pooling_mode="mean")
    with pytest.raises(ConfigError, match="has the order Transformer, Pooling, Normalize, Dense"):
        pooler(files)


def test_a_corrupt_list_of_modules_is_named(tmp_path: Path) -> None:
    files = checkpoint(tmp_path, "Transformer", "Pooling", pooling_mode="mean")
    for content in ("{", '[{"path": ""}]', "3"):
        (tmp_path / "modules.json").write_text(content)
        with pytest.raises(ModelFileError, match=r"modules\.json is corrupt"):
            pooler(files)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ({"pooling_type": "MAX"}, "pooling_type is MEAN, CLS or LAST, not 'MAX'"),
        ({"normalize": "yes"}, "normalize is true or false"),
        ({"matryoshka_dimensions": [0]}, "a list of whole numbers"),
        ({"prompt": 3}, "prompt is a text in front of others, not 3"),
        ({"task": "plugin"}, "task is embed, classify, token_embed, not 'plugin'"),
        ({"task": "classify"}, "has no classification head"),
        ({"pool": 1}, "no setting 'pool'; it has pooling_type"),
    ],
)
def test_a_wrong_override_is_named(tmp_path: Path, override: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        pooler(checkpoint(tmp_path), **override)


def test_lengths_that_the_model_was_trained_for(tmp_path: Path) -> None:
    assert pooler(checkpoint(tmp_path, config={"matryoshka_dimensions": [16, 4]})).matryoshka == [4]
    assert pooler(checkpoint(tmp_path, config={"is_matryoshka": True})).matryoshka == []


@pytest.mark.parametrize(
    ("config", "labels", "expected"),
    [
        ({}, 1, "sigmoid"),
        ({}, 3, "softmax"),
        ({"problem_type": "multi_label_classification"}, 3, "sigmoid"),
        ({"problem_type": "regression"}, 1, "none"),
        ({"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"}, 1, "none"),
        ({"sentence_transformers": {"activation_fn": "torch.nn.modules.activation.Sigmoid"}}, 1, "sigmoid"),
    ],
)
def test_what_follows_the_head(tmp_path: Path, config: dict[str, Any], labels: int, expected: str) -> None:
    found = pooler(checkpoint(tmp_path, config=config), labels=labels)
    assert found.activation == expected
    assert found.labels == [f"LABEL_{i}" for i in range(labels)]


def test_the_activation_that_newer_versions_store(tmp_path: Path) -> None:
    """Beside the config, in config_sentence_transformers.json; that of an embedding model is another thing."""
    settings(tmp_path, activation_fn="torch.nn.modules.linear.Identity")
    assert pooler(checkpoint(tmp_path), labels=1).activation == "none"
    settings(tmp_path, activation_fn="torch.nn.Tanh")
    assert pooler(checkpoint(tmp_path)).activation == "none"


def settings(folder: Path, **content: Any) -> None:
    (folder / "config_sentence_transformers.json").write_text(json.dumps(content))


def test_a_default_prompt_is_that_of_the_checkpoint(tmp_path: Path) -> None:
    files = checkpoint(tmp_path, "Transformer", "Pooling", pooling_mode="mean")
    prompts = {"query": "query: ", "document": None}
    for name, expected in ((None, ""), ("query", "query: "), ("document", "")):
        settings(tmp_path, prompts=prompts, default_prompt_name=name)
        assert pooler(files).prompt == expected
        assert pooler(files, prompt="mine ").prompt == "mine "
        assert pooler(files, labels=1).prompt == ""


def test_a_default_prompt_that_can_not_be_is_refused(tmp_path: Path) -> None:
    files = checkpoint(tmp_path, "Transformer", "Pooling", pooling_mode="mean", include_prompt=False)
    settings(tmp_path, prompts={"query": "query: "}, default_prompt_name="query")
    with pytest.raises(ConfigError, match=r"1_Pooling.*include_prompt=false.*--pooler-config"):
        pooler(files)
    assert pooler(files, prompt="").prompt == ""
    settings(tmp_path, prompts={"query": "query: "}, default_prompt_name="passage")
    with pytest.raises(ConfigError, match=r"default_prompt_name='passage', which is not among its prompts \('query'\)"):
        pooler(files)


def test_a_length_to_which_vectors_are_cut(tmp_path: Path) -> None:
    files = checkpoint(tmp_path, "Transformer", "Pooling", pooling_mode="mean")
    for length, expected in ((4, 4), (8, None), (None, None), (0, None)):
        settings(tmp_path, truncate_dim=length)
        assert pooler(files).dimensions == expected


def test_scores_of_a_tokens_logit(tmp_path: Path) -> None:
    """Such a reranker is served as a classifier of its tokens, or not at all."""
    files = checkpoint(tmp_path, "Transformer", "LogitScore")
    with pytest.raises(ConfigError, match=r"1_LogitScore.*--hf-overrides.*classifier_from_token"):
        pooler(files)
    assert pooler(files, labels=1).activation == "sigmoid"


def test_labels_bear_their_names(tmp_path: Path) -> None:
    config = {"id2label": {"0": "no", "1": "yes"}}
    assert pooler(checkpoint(tmp_path, config=config), labels=2).labels == ["no", "yes"]


def test_an_activation_that_is_not_known_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"torch\.nn\.Tanh"):
        pooler(checkpoint(tmp_path, config={"sbert_ce_default_activation_function": "torch.nn.Tanh"}), labels=1)


def test_the_length_that_the_authors_meant(tmp_path: Path) -> None:
    files = checkpoint(tmp_path, "Transformer", "Pooling", pooling_mode="mean")
    assert max_sequence_length(files) is None
    (tmp_path / "sentence_bert_config.json").write_text('{"max_seq_length": 256}')
    assert max_sequence_length(files) == 256


def test_the_length_of_a_camembert(tmp_path: Path) -> None:
    files = checkpoint(tmp_path, "Transformer", "Pooling", pooling_mode="mean")
    (tmp_path / "sentence_camembert_config.json").write_text('{"max_seq_length": 128}')
    assert max_sequence_length(files) == 128
