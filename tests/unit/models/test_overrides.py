"""Fields of a model's config that the user replaces: what becomes of them, and which are refused."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from toy_models import LLAMA, model_files

from octavo.build import build_core
from octavo.config import EngineConfig
from octavo.core.errors import ConfigError
from octavo.core.info import ModelInfo
from octavo.hub.overrides import with_overrides
from octavo.models.overrides import check_overrides
from octavo.models.registry import spec_of
from octavo.models.spec import DecoderSpec
from octavo.nn.rope_spec import LinearScaling, YarnScaling
from octavo.text.sources import model_files as found

NEWER = {k: v for k, v in LLAMA.items() if k != "rope_theta"} | {
    "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}


def spec(overrides: dict[str, Any], config: dict[str, Any] = LLAMA) -> DecoderSpec:
    files = with_overrides(model_files(config), overrides)
    check_overrides(files, overrides)
    return spec_of(files.config)


@pytest.mark.parametrize("config", [LLAMA, NEWER], ids=["older words", "newer words"])
@pytest.mark.parametrize("name", ["rope_scaling", "rope_parameters"])
def test_rotary_settings_in_either_words(config: dict[str, Any], name: str) -> None:
    theta = spec({}, config).rope.theta
    stretched = spec({name: YARN}, config).rope
    assert isinstance(stretched.scaling, YarnScaling)
    assert (stretched.scaling.factor, stretched.max_position, stretched.theta) == (4.0, 1024, theta)
    other = spec({name: YARN | {"rope_theta": 7e4}}, config).rope
    assert other.theta == 7e4
    both = spec({name: {"type": "linear", "factor": 2}, "rope_theta": 3e4}, config).rope
    assert (both.theta, both.scaling) == (3e4, LinearScaling(2.0))
    assert spec({"rope_theta": 3e4}, config).rope.theta == 3e4


def test_a_models_own_scaling_goes_where_another_or_none_is_given() -> None:
    scaled = LLAMA | {"rope_scaling": YARN}
    assert isinstance(spec({}, scaled).rope.scaling, YarnScaling)
    assert spec({"rope_scaling": None}, scaled).rope.scaling is None
    theta = spec({"rope_theta": 9e5}, scaled).rope
    assert isinstance(theta.scaling, YarnScaling)
    assert theta.theta == 9e5


def test_nested_configs_are_merged_and_all_else_is_replaced() -> None:
    files = with_overrides(
        model_files(LLAMA | {"text_config": {"a": 1, "b": 2}, "extra": {"a": 1}}),
        {"text_config": {"b": 3}, "extra": {"b": 3}, "max_position_embeddings": 99},
    )
    assert files.config["text_config"] == {"a": 1, "b": 3}
    assert files.config["extra"] == {"b": 3}
    assert spec_of(files.config).max_position == 99


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        ({"max_position_embedings": 9}, "max_position_embedings: neither.*did you mean max_position_embeddings"),
        ({"max_position_embeddings": "9"}, "max_position_embeddings: '9' must be a number, as the model's own 256"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings: 1 must be true or false"),
        ({"hidden_size": True}, "hidden_size: True must be a number"),
        ({"rope_scaling": {"factor": 4.0}}, "rope_scaling: it has no rope_type"),
        ({"rope_scaling": YARN | {"fctor": 4.0}}, "no rotary setting 'fctor'"),
        ({"rope_parameters": YARN | {"factor": "4"}}, "rope_parameters: factor='4' must be a number over 0"),
        ({"rope_scaling": YARN, "rope_parameters": YARN}, "rope_parameters is overridden too"),
        ({"rope_scaling": 4}, "rope_scaling: 4 must be an object"),
        ({"rope_theta": "x"}, "rope_theta: 'x' must be a number over 0"),
        ({"head_dim": [4]}, "head_dim"),
    ],
)
def test_what_cannot_be_is_refused_by_name(overrides: dict[str, Any], says: str) -> None:
    with pytest.raises(Exception, match=says) as caught:
        spec(overrides)
    assert type(caught.value).__name__ in ("ConfigError", "ModelFileError")


def test_a_field_that_nothing_reads_is_told(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        spec({"attention_dropout": 0.5}, LLAMA | {"attention_dropout": 0.0})
    assert "--hf-overrides attention_dropout has no effect" in caplog.text


def test_older_names_are_two_of_the_overrides() -> None:
    made = EngineConfig.of(rope_theta=3e4, rope_scaling=YARN, hf_overrides={"vocab_size": 7}).model.config_overrides
    assert made == {"rope_theta": 3e4, "rope_scaling": YARN, "vocab_size": 7}
    with pytest.raises(ConfigError, match="--hf-overrides rope_theta and --rope-theta are both given"):
        _ = EngineConfig.of(rope_theta=3e4, hf_overrides={"rope_theta": 2.0}).model.config_overrides
    with pytest.raises(ConfigError, match="rope_theta=0 must be a number over 0"):
        EngineConfig.of(rope_theta=0)


def built(config: dict[str, Any], **settings: Any) -> ModelInfo:
    given = {"load_format": "dummy", "dtype": "float32", "memory_bytes": 1 << 21, "threads": 1}
    made = EngineConfig.of(**given | settings)
    loop, info = build_core(made, with_overrides(model_files(config), made.model.config_overrides))
    loop.close()
    return info


def test_the_engine_goes_by_the_overrides() -> None:
    assert built(LLAMA, hf_overrides={"max_position_embeddings": 96}).max_model_len == 96
    with pytest.raises(ConfigError, match="neither the model nor its architecture"):
        built(LLAMA, hf_overrides={"max_positions": 96})


def test_an_override_that_contradicts_the_weights_is_named(tmp_path: Path) -> None:
    weights = tmp_path / "model.safetensors"
    save_file({"model.embed_tokens.weight": torch.zeros(LLAMA["vocab_size"], 64)}, weights)
    files = replace(model_files(LLAMA), weights=(weights,))
    config = EngineConfig.of(dtype="float32", hf_overrides={"vocab_size": 77})
    with pytest.raises(
        ConfigError, match=r"--hf-overrides vocab_size: the weights don't fit.*embed_tokens.*\[77, 64\]"
    ):
        build_core(config, with_overrides(files, config.model.config_overrides))


def test_without_its_window_a_model_takes_no_more_than_the_window() -> None:
    windowed = LLAMA | {"architectures": ["MistralForCausalLM"], "sliding_window": 64}
    assert built(windowed).max_model_len == 256
    assert built(windowed, disable_sliding_window=True).max_model_len == 64
    assert built(LLAMA, disable_sliding_window=True).max_model_len == 256
    with pytest.raises(ConfigError, match="--max-model-len 65 is more than the model's own maximum of 64"):
        built(windowed, disable_sliding_window=True, max_model_len=65)
    plain = spec_of(windowed).without_windows()
    assert plain.windows == (None, None)


def test_sources_apply_them(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"], "vocab_size": 5}')
    config = EngineConfig.of(model=str(tmp_path), hf_overrides={"vocab_size": 9}).model
    files = found(config, weights=False)
    assert files.config["vocab_size"] == 9
    assert files.own_fields == {"architectures", "vocab_size"}
