"""What the bridge refuses, and why."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from toy_engine import tiny_config
from toy_models import LLAMA, model_files

from octavo.build_worker import build_local, implementation_of
from octavo.core.errors import ConfigError

TINY: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}


def refused(config: dict[str, Any], folder: Path = Path("tiny"), **settings: Any) -> str:
    """The error of a configuration."""
    files = model_files(config, folder)
    with pytest.raises(ConfigError) as caught:
        implementation_of(tiny_config(**settings), files).spec_of(files.config)
    return str(caught.value)


def of(architecture: str, kind: str, **changes: Any) -> dict[str, Any]:
    return {**TINY, "architectures": [architecture], "model_type": kind, **changes}


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (of("MambaForCausalLM", "mamba"), "keeps a recurrent state"),
        (of("Lfm2ForCausalLM", "lfm2", layer_types=["conv", "full_attention"]), "layers of type conv"),
        (of("BloomForCausalLM", "bloom"), "_supports_attention_backend is false"),
        (of("LlavaForConditionalGeneration", "llava"), "takes images"),
        (of("T5ForConditionalGeneration", "t5"), "an encoder and a decoder"),
        (of("ElectraForMaskedLM", "electra"), "is not a language model"),
        (of("ElectraForCausalLM", "electra"), "attends in both directions"),
        (of("BitNetForCausalLM", "bitnet", is_causal=False), "is_causal is false in its config"),
        (of("ArceeForSequenceClassification", "arcee"), "Octavo runs ArceeForCausalLM"),
        (of("DiffLlamaForCausalLM", "diffllama"), "attends more than once in a step"),
        (of("NemotronForCausalLM", "nemotron"), "does not pass its keyword arguments on"),
        (
            of("GptOssForCausalLM", "gpt_oss", num_local_experts=2, num_experts_per_tok=1, head_dim=16),
            "passes s_aux to its attention",
        ),
        (
            of("ArceeForCausalLM", "arcee", rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}),
            "from the longest sequence of a batch",
        ),
        (of("ArceForCausalLM", "arce"), "the nearest known one is ArceeForCausalLM"),
        (of("ArceeForCausalLM", "arcee", quantization_config={"quant_method": "exl3"}), "quant_method is 'exl3'"),
        (of("ArceeForCausalLM", "arcee", num_attention_heads="4"), "num_attention_heads"),
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else "",
)
def test_architectures_are_refused_by_name(config: dict[str, Any], says: str) -> None:
    assert says in refused(config, model_impl="transformers")


@pytest.mark.parametrize("settings", [{}, {"model_impl": "octavo"}])
@pytest.mark.parametrize(
    ("config", "says"),
    [
        (of("OPTForCausalLM", "opt", ffn_dim=96, do_layer_norm_before=False), "do_layer_norm_before=False"),
        (of("OPTForCausalLM", "opt", ffn_dim=96, word_embed_proj_dim=48), "word_embed_proj_dim=48"),
        (of("OlmoeForCausalLM", "olmoe", num_experts=4, num_experts_per_tok=2, clip_qkv=8.0), "clip_qkv=8.0"),
    ],
)
def test_what_own_layers_lack_is_refused_with_the_bridge_as_remedy(
    config: dict[str, Any], says: str, settings: dict[str, Any]
) -> None:
    text = refused(config, **settings)
    assert says in text
    assert text.endswith("only. Set --model-impl transformers to try the modules of transformers.")
    files = model_files(config)
    bridged = implementation_of(tiny_config(model_impl="transformers"), files)
    assert bridged.spec_of(files.config).hidden_size == config.get("word_embed_proj_dim", 64)


def test_the_reason_names_the_architecture_and_the_remedy() -> None:
    text = refused(of("BloomForCausalLM", "bloom"), model_impl="transformers")
    assert text.startswith("BloomForCausalLM can't be computed by transformers' modules")
    assert text.endswith("Serve another model.")


def test_without_a_model_type_the_name_says_it() -> None:
    config = of("MambaForCausalLM", "mamba")
    del config["model_type"]
    assert "keeps a recurrent state" in refused(config, model_impl="transformers")


@pytest.mark.parametrize("settings", [{"model_impl": "transformers"}, {"compilation": True}])
@pytest.mark.parametrize("architecture", ["BertModel", "Qwen2Model"])
def test_encoders_are_computed_by_own_layers(architecture: str, settings: dict[str, Any]) -> None:
    """They were built so whatever the setting; decoders that are not causal are encoders, too."""
    files = model_files(of(architecture, "any", is_causal=False), Path("tiny"))
    with pytest.raises(ConfigError, match=r"own layers"):
        build_local(tiny_config(**settings), files)
    implementation_of(tiny_config(), files)


def test_settings_that_do_not_go_with_it() -> None:
    assert "--kv-cache-dtype fp8" in refused(of("BitNetForCausalLM", "bitnet"), kv_cache_dtype="fp8")


def test_overridden_fields_must_exist() -> None:
    config = of("BitNetForCausalLM", "bitnet")
    assert "--hf-overrides max_positions: neither" in refused(config, hf_overrides={"max_positions": 64})
    files = model_files(config)
    fields = {"max_position_embeddings": 64, "rope_scaling": {"rope_type": "linear", "factor": 2.0}}
    implementation_of(tiny_config(hf_overrides=fields), files).spec_of(files.config)


@pytest.mark.parametrize(
    ("scaling", "longest"),
    [
        (None, 256),
        ({"type": "linear", "factor": 4.0}, 1024),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}, 512),
    ],
)
def test_sequences_are_as_long_as_with_own_layers(scaling: dict[str, Any] | None, longest: int) -> None:
    files = model_files(LLAMA | {"rope_scaling": scaling})
    for name in ("octavo", "transformers"):
        assert implementation_of(tiny_config(model_impl=name), files).spec_of(files.config).max_position == longest


def test_own_families_are_computed_by_own_layers_unless_asked() -> None:
    assert implementation_of(tiny_config(), model_files(LLAMA)).name == ""
    assert implementation_of(tiny_config(model_impl="transformers"), model_files(LLAMA)).name.startswith("transformers")


def test_without_the_bridge_others_are_refused() -> None:
    assert "Octavo supports" in refused(of("BitNetForCausalLM", "bitnet"), model_impl="octavo")


@pytest.mark.parametrize(
    ("config", "settings", "says"),
    [
        (of("BitNetForCausalLM", "bitnet"), {}, "The model's architecture is BitNetForCausalLM"),
        (LLAMA, {"model_impl": "transformers"}, "--model-impl transformers needs"),
    ],
)
def test_the_missing_package_is_named_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch, config: dict[str, Any], settings: dict[str, Any], says: str
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    text = refused(config, **settings)
    assert says in text
    assert "pip install 'octavo[transformers]'" in text


CODE = of(
    "MyForCausalLM",
    "my-own",
    auto_map={"AutoConfig": "configuration_my.MyConfig", "AutoModelForCausalLM": "modeling_my.MyForCausalLM"},
)


def test_code_of_a_model_is_not_run_by_default() -> None:
    text = refused(CODE)
    assert "modeling_my.py" in text
    assert "--trust-remote-code if you trust it" in text


def test_code_that_is_not_in_the_folder(tmp_path: Path) -> None:
    text = refused(CODE, tmp_path, trust_remote_code=True)
    assert f"modeling_my.py, which {tmp_path} lacks" in text
