"""Configurations as they are found in the wild, and what they become."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from toy_models import LATENT

from octavo.core.errors import ConfigError, ModelFileError
from octavo.models.feed_forwards.spec import ExpertsSpec, MlpSpec
from octavo.models.registry import ARCHITECTURES, build_model, spec_of, stated_spec
from octavo.models.spec import HeadNorms, NormSpec
from octavo.nn.attention.reference import ReferenceAttention
from octavo.nn.experts_spec import ClampedGate
from octavo.nn.rope_spec import LinearScaling, Llama3Scaling, LongRopeScaling, YarnScaling

BASE = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 50,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
}


def config(architecture: str = "LlamaForCausalLM", **changes: Any) -> dict[str, Any]:
    merged = {**BASE, "architectures": [architecture], **changes}
    return {name: value for name, value in merged.items() if value is not ...}


def test_an_older_llama_config() -> None:
    spec = spec_of(config(num_key_value_heads=..., rope_theta=5e5, rope_scaling=None, torch_dtype="bfloat16"))
    assert (spec.num_heads, spec.num_kv_heads, spec.head_dim) == (8, 8, 8)
    assert spec.rope.theta == 5e5
    assert spec.rope.scaling is None
    assert spec.max_position == 256
    assert spec.windows == (None,) * 4
    assert spec.biases == frozenset()
    assert not spec.tied


@pytest.mark.parametrize("style", ["old", "older", "new"])
def test_linear_scaling_in_every_spelling(style: str) -> None:
    spelt = {
        "older": {"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 2.0}},
        "old": {"rope_theta": 1e4, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        "new": {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
    }
    rope = spec_of(config(**spelt[style])).rope
    assert rope.scaling == LinearScaling(2.0)
    assert rope.theta == 1e4


@pytest.mark.parametrize(
    ("architecture", "more", "longest"),
    [
        ("LlamaForCausalLM", {}, 1024),
        ("LlamaForCausalLM", {"original_max_position_embeddings": 64}, 256),
        ("Gemma3ForCausalLM", {}, 256),
    ],
)
def test_linear_scaling_stretches_the_context(architecture: str, more: dict[str, Any], longest: int) -> None:
    """Vicuna 16k and LongChat state the length before scaling; Gemma 3, and configs with both, the one after it."""
    scaling = {"type": "linear", "factor": 4.0, **more}
    assert spec_of(config(architecture, rope_scaling=scaling)).max_position == longest


def test_llama3_scaling() -> None:
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    assert spec_of(config(rope_scaling=scaling)).rope.scaling == Llama3Scaling(8.0, 1.0, 4.0, 64)
    del scaling["low_freq_factor"]
    with pytest.raises(ModelFileError, match=r"'low_freq_factor'.*rope type 'llama3' needs"):
        spec_of(config(rope_scaling=scaling))


def test_yarn_stretches_the_context() -> None:
    """Configs may leave max_position_embeddings at the length before stretching."""
    rope = spec_of(config("Qwen2ForCausalLM", rope_scaling={"type": "yarn", "factor": 4.0})).rope
    assert rope.max_position == 1024
    assert isinstance(rope.scaling, YarnScaling)
    assert rope.scaling.original_max_position == 256
    assert rope.scaling.attention_factor == pytest.approx(1.1386294)


@pytest.mark.parametrize("kind", ["axial", "mrope"])
def test_an_unsupported_rope_type_is_named(kind: str) -> None:
    with pytest.raises(ConfigError, match=rf"'{kind}'.*default, linear, dynamic, llama3, longrope, yarn, proportional"):
        spec_of(config(rope_scaling={"rope_type": kind, "factor": 2.0}))


def test_rope_per_layer_type_is_refused() -> None:
    nested = {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}
    with pytest.raises(ConfigError, match="full_attention"):
        spec_of(config(rope_parameters=nested))


def test_mistral_windows() -> None:
    assert spec_of(config("MistralForCausalLM")).windows == (4096,) * 4
    assert spec_of(config("MistralForCausalLM", sliding_window=None)).windows == (None,) * 4
    assert spec_of(config("MistralForCausalLM", sliding_window=9)).windows == (9,) * 4


def test_qwen_windows_need_the_switch() -> None:
    settings = {"sliding_window": 16, "max_window_layers": 3}
    assert spec_of(config("Qwen2ForCausalLM", **settings)).windows == (None,) * 4
    assert spec_of(config("Qwen2ForCausalLM", use_sliding_window=True, **settings)).windows == (None, None, None, 16)


def test_layer_types_say_which_layers_have_windows() -> None:
    types = ["sliding_attention", "full_attention"] * 2
    settings = {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 0}
    assert spec_of(config("Qwen3ForCausalLM", layer_types=types, **settings)).windows == (16, None, 16, None)
    with pytest.raises(ModelFileError, match="lists 3 layer_types for 4 layers"):
        spec_of(config("Qwen3ForCausalLM", layer_types=types[:3], **settings))
    with pytest.raises(ConfigError, match="linear_attention"):
        spec_of(config("Qwen3ForCausalLM", layer_types=["linear_attention", *types[1:]], **settings))


def test_families_differ_where_they_should() -> None:
    assert spec_of(config(attention_bias=True)).biases == {"qkv", "o"}
    assert spec_of(config(mlp_bias=True)).biases == {"mlp"}
    assert spec_of(config("Qwen2ForCausalLM")).biases == {"qkv"}
    qwen3 = spec_of(config("Qwen3ForCausalLM"))
    assert (qwen3.biases, qwen3.head_norms, qwen3.head_dim) == (frozenset(), HeadNorms(NormSpec(1e-5)), 128)


def test_an_unknown_architecture_lists_those_known() -> None:
    with pytest.raises(ConfigError, match="RwkvForCausalLM") as caught:
        spec_of(config("RwkvForCausalLM"))
    for name in ARCHITECTURES:
        assert name in str(caught.value)


def test_an_unknown_architecture_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"Olmo4ForCausalLM.*nearest that Octavo has is Olmo2?3?ForCausalLM"):
        spec_of(config("Olmo4ForCausalLM"))


def test_a_bare_model_is_recognised_by_its_architecture() -> None:
    gpt2 = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 32, "vocab_size": 50}
    assert spec_of({**gpt2, "architectures": ["GPT2Model"]}).tied
    assert spec_of(config("LlamaModel")).tied


def test_long_rope_uses_the_short_factors_where_they_suffice() -> None:
    """As many positions as in training are those of the model before it was stretched."""
    scaling = {"rope_type": "longrope", "long_factor": [4.0] * 4, "short_factor": [1.5] * 4}
    spec = spec_of(config("Phi3ForCausalLM", rope_scaling=scaling, original_max_position_embeddings=64))
    assert isinstance(spec.rope.scaling, LongRopeScaling)
    assert spec.rope.scaling.divisors == (4.0,) * 4
    for limit, expected in ((None, 4.0), (65, 4.0), (64, 1.5)):
        limited = spec.within(limit).rope.scaling
        assert isinstance(limited, LongRopeScaling)
        assert limited.divisors == (expected,) * 4


def test_the_multipliers_of_minicpm_3() -> None:
    """Null means no multiplier, unlike a field that is missing; Transformers' configuration says so."""
    latent = {"kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8}
    stated = spec_of(config("MiniCPM3ForCausalLM", **latent, scale_depth=None, dim_model_base=None)).multipliers
    assert (stated.residual, stated.logits) == (1.0, 1.0)
    missing = spec_of(config("MiniCPM3ForCausalLM", **latent)).multipliers
    assert (missing.residual, missing.logits) == (0.7, 4.0)


def test_gpt_oss_as_published() -> None:
    scaling = {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    }
    spec = spec_of(
        config(
            "GptOssForCausalLM",
            rope_theta=150000,
            rope_scaling=scaling,
            max_position_embeddings=131072,
            sliding_window=128,
            layer_types=["sliding_attention", "full_attention"] * 2,
            num_local_experts=32,
            num_experts_per_tok=4,
            swiglu_limit=7.0,
            quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]},
        )
    )
    assert spec.windows == (128, None, 128, None)
    assert spec.sinks
    assert spec.head_dim == 64
    assert spec.max_position == 131072
    assert isinstance(spec.rope.scaling, YarnScaling)
    assert not spec.rope.scaling.truncate
    (experts,) = set(spec.mlps)
    assert isinstance(experts, ExpertsSpec)
    assert (experts.num_experts, experts.routing.top_k, experts.bias) == (32, 4, True)
    assert experts.clamped == ClampedGate(1.702, 7.0)


def test_llama4_as_published() -> None:
    text = config(
        rope_scaling={
            "factor": 8.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        max_position_embeddings=10485760,
        intermediate_size_mlp=128,
        no_rope_layers=[],
        interleave_moe_layer_step=2,
        use_qk_norm=False,
    )
    text["model_type"] = "llama4_text"
    spec = spec_of({"architectures": ["Llama4ForConditionalGeneration"], "text_config": text})
    assert spec.chunked
    assert spec.windows == (8192, 8192, 8192, None)
    assert [rope.rotary_dim for rope in spec.ropes] == [128, 128, 128, 0]
    assert [type(mlp) for mlp in spec.mlps] == [MlpSpec, ExpertsSpec] * 2
    assert spec.head_norms is None
    assert spec.max_position == 10485760
    assert {rope.max_position for rope in spec.within(1000).ropes} == {1000}


@pytest.mark.parametrize("normed", [True, False])
def test_norms_after_rotation_undo_the_factor_of_yarn_in_llama4(normed: bool) -> None:
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    spec = spec_of(config("Llama4ForCausalLM", head_dim=16, rope_scaling=scaling, use_qk_norm=normed))
    assert isinstance(spec.rope.scaling, YarnScaling)
    assert spec.rope.scaling.attention_factor == pytest.approx(1.0 if normed else 1.1386294)


def test_a_text_half_of_gemma3_as_published() -> None:
    """Its configuration states only what differs from Transformers' defaults."""
    text = {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    spec = spec_of({"architectures": ["Gemma3ForConditionalGeneration"], "text_config": text})
    assert (spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.vocab_size) == (8, 4, 256, 262208)
    assert spec.windows[:6] == (1024,) * 5 + (None,)
    assert spec.tied
    assert spec.stored.nested


@pytest.mark.parametrize(
    ("name", "text", "sizes"),
    [
        (
            "Qwen2AudioForConditionalGeneration",
            {"model_type": "qwen2", "intermediate_size": 11008, "max_position_embeddings": 8192, "use_mrope": False}
            | {"rms_norm_eps": 1e-5, "rope_theta": 10000, "sliding_window": 32768, "vocab_size": 156032},
            (32, 32, 32, 128, 156032, False),
        ),
        (
            "AudioFlamingo3ForConditionalGeneration",
            {"model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28}
            | {"num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 151672, "rope_theta": 1000000.0},
            (28, 28, 4, 128, 151672, False),
        ),
        (
            "Qwen3ASRForConditionalGeneration",
            {"model_type": "qwen3", "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28}
            | {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": True}
            | {"rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"}},
            (28, 16, 8, 128, 151936, True),
        ),
    ],
)
def test_text_halves_of_models_with_audio(name: str, text: dict[str, Any], sizes: tuple[int, ...]) -> None:
    for outer in ({"text_config": text}, {"thinker_config": {"text_config": text}}):
        spec = spec_of({"architectures": [name], "model_type": "any", **outer})
        heads = (spec.num_heads, spec.num_kv_heads, spec.head_dim)
        assert (len(spec.mlps), *heads, spec.vocab_size, spec.tied) == sizes
        assert spec.stored.nested


def test_qwen3_5_as_published() -> None:
    rope = {
        "rope_type": "default",
        "rope_theta": 1e7,
        "partial_rotary_factor": 0.25,
        "mrope_section": [11, 11, 10],
        "mrope_interleaved": True,
    }
    text = {
        "model_type": "qwen3_5_moe_text",
        "attn_output_gate": True,
        "full_attention_interval": 4,
        "hidden_size": 2048,
        "num_hidden_layers": 40,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "mlp_only_layers": [],
        "mtp_num_hidden_layers": 1,
        "max_position_embeddings": 262144,
        "rope_parameters": rope,
    }
    spec = spec_of({"architectures": ["Qwen3_5MoeForConditionalGeneration"], "text_config": text})
    assert (spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.vocab_size) == (16, 2, 256, 248320)
    assert spec.attention_layers == list(range(3, 40, 4))
    assert (spec.rope.rotary_dim, spec.rope.theta, spec.max_position) == (64, 1e7, 262144)
    assert spec.rope.axes == (0, 1, 2) * 10 + (0, 1)
    experts = spec.mlps[0]
    assert isinstance(experts, ExpertsSpec)
    assert (experts.num_experts, experts.size, experts.routing.top_k) == (256, 512, 8)
    assert experts.shared is not None
    assert spec.norm.offset == 1.0
    with pytest.raises(ConfigError, match="attn_output_gate=False"):
        spec_of(config("Qwen3_5ForCausalLM", attn_output_gate=False))


def test_axes_of_positions() -> None:
    """Of images: consecutive pairs of channels, or alternating ones, where the first axis has the rest."""

    def axes(**rope: Any) -> tuple[int, ...]:
        stated = {"rope_type": "default", "rope_theta": 1e6, **rope}
        return spec_of(config("Qwen3ForCausalLM", head_dim=16, rope_parameters=stated)).rope.axes

    assert axes() == ()
    assert axes(mrope_section=[2, 3, 3]) == (0, 0, 1, 1, 1, 2, 2, 2)
    assert axes(mrope_section=[4, 2, 2], mrope_interleaved=True) == (0, 1, 2, 0, 1, 2, 0, 0)
    with pytest.raises(ModelFileError, match=r"mrope_section=\[2, 3, 4\]; its sum should be 8"):
        axes(mrope_section=[2, 3, 4])


def test_an_unknown_text_half_is_named() -> None:
    outer = {"architectures": ["LlavaForConditionalGeneration"], "text_config": config("OlmoForCausalLM")}
    assert spec_of(outer).stored.nested
    outer["text_config"]["architectures"] = ["RwkvForCausalLM"]
    with pytest.raises(
        ConfigError, match=r"LlavaForConditionalGeneration: its text half is RwkvForCausalLM\. Octavo has"
    ):
        spec_of(outer)


@pytest.mark.parametrize(
    ("architecture", "fields", "activation"),
    [
        ("GemmaForCausalLM", {"hidden_act": "gelu"}, "gelu_tanh"),
        ("GemmaForCausalLM", {"hidden_act": "gelu", "hidden_activation": None}, "gelu_tanh"),
        ("GemmaForCausalLM", {"hidden_act": "silu"}, "silu"),
        ("Gemma2ForCausalLM", {}, "gelu_tanh"),
        ("Gemma2ForCausalLM", {"hidden_activation": "gelu"}, "gelu"),
        ("Gemma3ForCausalLM", {"hidden_activation": "relu"}, "relu"),
    ],
)
def test_activations_of_gemma(architecture: str, fields: dict[str, Any], activation: str) -> None:
    assert {mlp and mlp.activation for mlp in spec_of(config(architecture, **fields)).mlps} == {activation}


def test_soft_caps_of_gemma2_can_be_switched_off() -> None:
    spec = spec_of(config("Gemma2ForCausalLM"))
    assert (spec.attention_cap, spec.logit_cap) == (50.0, 30.0)
    spec = spec_of(config("Gemma2ForCausalLM", attn_logit_softcapping=None, final_logit_softcapping=None))
    assert (spec.attention_cap, spec.logit_cap) == (None, None)


@pytest.mark.parametrize(("fraction", "width"), [(0.25, 2), (1.5, 12), (0.4, 3)])
def test_an_impossible_fraction_of_rotated_channels_is_named(fraction: float, width: int) -> None:
    if width == 2:
        assert spec_of(config(partial_rotary_factor=fraction)).rope.rotary_dim == width
        return
    with pytest.raises(ModelFileError, match=f"partial_rotary_factor={fraction}"):
        spec_of(config(partial_rotary_factor=fraction))


@pytest.mark.parametrize("name", ["hidden_size", "num_hidden_layers", "vocab_size", "max_position_embeddings"])
@pytest.mark.parametrize(
    ("value", "says"), [(..., "has no '{}'"), (None, "has no '{}'"), ("64", "{}='64'"), (0, "{}=0")]
)
def test_a_bad_field_is_named(name: str, value: Any, says: str) -> None:
    with pytest.raises(ModelFileError) as caught:
        spec_of(config(**{name: value}))
    assert says.format(name) in str(caught.value)


def test_more_layers_than_could_be_built_are_refused() -> None:
    with pytest.raises(ModelFileError, match="num_hidden_layers=1000000000; models of up to 10000 layers"):
        spec_of(config(num_hidden_layers=10**9))


@pytest.mark.parametrize(
    ("architecture", "name", "kind"),
    [
        ("LlamaForCausalLM", "rms_norm_eps", "a number"),
        ("LlamaForCausalLM", "rope_theta", "a number"),
        ("CohereForCausalLM", "logit_scale", "a number"),
        ("FalconForCausalLM", "parallel_attn", "true or false"),
    ],
)
def test_a_text_in_place_of_a_number_or_a_truth_value_is_named(architecture: str, name: str, kind: str) -> None:
    with pytest.raises(ModelFileError, match=f"has {name}='no', which should be {kind}"):
        spec_of(config(architecture, **{name: "no"}))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"hidden_act": "mish"}, "hidden_act='mish'"),
        ({"quantization_config": {"quant_method": "exl3"}}, "quant_method is 'exl3'"),
        ({"architectures": ["OlmoeForCausalLM"], "clip_qkv": 8.0}, "clip_qkv=8.0"),
        ({"architectures": ["JambaForCausalLM"], "hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"architectures": ["Ernie4_5_MoeForCausalLM"], "use_bias": True}, "use_bias=True"),
        ({**LATENT, "mlp_bias": True}, "mlp_bias=True"),
        ({"architectures": ["PhiForCausalLM"], "tie_word_embeddings": True}, "tie_word_embeddings=True"),
        ({"architectures": ["DeepseekV2ForCausalLM"], "scoring_func": "sigmoid"}, "scoring_func='sigmoid'"),
        ({"architectures": ["DeepseekV3ForCausalLM"], "scoring_func": "softmax"}, "scoring_func='softmax'"),
    ],
)
def test_an_unsupported_feature_is_named(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        spec_of(config(**changes))
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        (
            {"n_group": 4, "topk_group": 1, "num_experts_per_tok": 5},
            "n_routed_experts=16 in n_group=4.*topk_group=1.*choose 5",
        ),
        ({"n_group": 5, "topk_group": 2}, "n_routed_experts=16 in n_group=5"),
        ({"n_group": 1, "topk_group": 1, "num_experts_per_tok": 17}, "n_routed_experts=16: .*choose 17"),
    ],
)
def test_more_experts_per_token_than_there_are_to_choose_from(fields: dict[str, Any], says: str) -> None:
    """Kernels would choose among experts of other groups, each in its own way."""
    experts = {"n_routed_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    fields = {**LATENT, **experts, "architectures": ["DeepseekV3ForCausalLM"], "first_k_dense_replace": 0, **fields}
    with pytest.raises(ModelFileError, match=says):
        spec_of(fields)


def test_dense_layers_beside_experts_have_the_stated_activation() -> None:
    fields = {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 16, "hidden_act": "gelu"}
    mlps = spec_of(config("Ernie4_5_MoeForCausalLM", **fields)).mlps
    assert [(type(mlp), mlp.activation) for mlp in mlps[:2]] == [(MlpSpec, "gelu"), (ExpertsSpec, "gelu")]


def test_experts_in_every_nth_layer() -> None:
    """DeepSeek's own code has them where a layer's number is a multiple of `moe_layer_freq`."""
    fields = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "moe_layer_freq": 2}
    config = {**LATENT, **fields, "architectures": ["DeepseekV3ForCausalLM"], "num_hidden_layers": 5}
    kinds = [type(mlp) for mlp in spec_of({**config, "first_k_dense_replace": 1}).mlps]
    assert kinds == [MlpSpec, MlpSpec, ExpertsSpec, MlpSpec, ExpertsSpec]


_EXPERTS = {"n_routed_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_V3 = {**LATENT, **_EXPERTS, "architectures": ["DeepseekV3ForCausalLM"], "first_k_dense_replace": 0}
_HYBRID = {"mamba_n_heads": 8, "mamba_d_head": 16, "num_local_experts": 0}
_GROWING = {"rope_parameters": {"original_max_position_embeddings": 8}}


@pytest.mark.parametrize(
    ("fields", "name", "default"),
    [
        (_V3, "n_group", 8),
        (_V3, "topk_group", 4),
        (_V3, "n_shared_experts", 1),
        (_V3, "routed_scaling_factor", 2.5),
        (config("Glm4MoeForCausalLM", head_dim=16, **_EXPERTS), "n_shared_experts", 1),
        (config("GraniteMoeHybridForCausalLM", **_HYBRID), "rms_norm_eps", 1e-6),
        (config("Ministral3ForCausalLM", **_GROWING), "rms_norm_eps", 1e-5),
        (config("PhimoeForCausalLM", num_local_experts=4), "rope_theta", 1000000.0),
    ],
)
def test_defaults_that_are_the_familys_own(fields: dict[str, Any], name: str, default: float) -> None:
    """Those of the authors' configuration classes, which Transformers has, too."""
    left_out = {key: value for key, value in fields.items() if key != name}
    assert spec_of(left_out) == spec_of({**fields, name: default})
    assert spec_of(left_out) != spec_of({**fields, name: 2 * default})


def test_heads_must_divide() -> None:
    with pytest.raises(ModelFileError, match=r"num_attention_heads=8.*num_key_value_heads=3"):
        spec_of(config(num_key_value_heads=3))


def test_no_architecture_at_all() -> None:
    with pytest.raises(ModelFileError, match="architectures"):
        spec_of({**BASE})


def test_building_takes_no_memory_and_lists_the_attention_layers_in_order() -> None:
    """A model of hundreds of gigabytes builds at once: tensors come with the weights."""
    big = config("Qwen2ForCausalLM", hidden_size=16384, intermediate_size=65536, num_hidden_layers=5, vocab_size=10**6)
    big |= {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 2}
    model = build_model(spec_of(big), dtype=torch.float32, device=torch.device("cpu"), attention=ReferenceAttention())
    assert [layer.spec.window for layer in model.attention_layers] == [None, None, 7, 7, 7]
    assert sum(layer.cache.numel() for layer in model.attention_layers) == 0


def test_a_spec_needs_no_torch() -> None:
    code = "import octavo.models.spec, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_latent_attention_has_no_longer_sequences_than_it_was_trained_for() -> None:
    """Unlike recurrent layers, which have no limit."""
    longest = spec_of(LATENT).max_position
    assert spec_of(LATENT).within(longest + 1).max_position == longest
    assert spec_of(LATENT).within(longest - 1).max_position == longest - 1


@pytest.mark.parametrize("architecture", ["Qwen2ForCausalLM", "LlamaModel", "Qwen3ForSequenceClassification"])
def test_decoders_that_attend_to_later_tokens_have_no_cache(architecture: str) -> None:
    """Some embedding models are decoders trained so (gte-Qwen2); transformers reads the same field."""
    changed = config(architecture, is_causal=False)
    with pytest.raises(ConfigError, match=rf"{architecture}.*later ones"):
        spec_of(changed)
    spec = stated_spec(changed)
    assert spec.bidirectional
    assert spec.summary == ("last" if spec.num_labels else "mean")
    assert not spec_of(config(architecture, is_causal=True)).bidirectional


def test_a_text_half_that_attends_to_later_tokens_is_refused() -> None:
    half = config("Gemma3ForCausalLM", model_type="gemma3_text", head_dim=8, use_bidirectional_attention=True)
    with pytest.raises(ConfigError, match="by themselves only"):
        spec_of({"architectures": ["Gemma3ForConditionalGeneration"], "text_config": half})


@pytest.mark.parametrize("architecture", ["GemmaForCausalLM", "Gemma2ForCausalLM"])
def test_of_the_gemmas_the_third_is_bidirectional(architecture: str) -> None:
    with pytest.raises(ConfigError, match="use_bidirectional_attention=True"):
        stated_spec(config(architecture, head_dim=8, use_bidirectional_attention=True))


@pytest.mark.parametrize("architecture", ["Gemma3TextModel", "Gemma3TextForSequenceClassification"])
def test_the_text_half_of_gemma_3_by_itself(architecture: str) -> None:
    """So transformers names it where it makes vectors or labels."""
    spec = spec_of(config(architecture, head_dim=8))
    assert spec.tied
    assert spec.num_labels == (2 if architecture.endswith("Classification") else 0)
