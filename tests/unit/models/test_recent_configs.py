"""Configurations of families of 2025 and 2026 as their authors publish them, and what becomes of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from octavo.core.errors import ConfigError, ModelFileError
from octavo.models.feed_forwards.spec import ExpertsSpec, MlpSpec
from octavo.models.mixers.spec import LatentSelfAttention, Temperature
from octavo.models.registry import spec_of
from octavo.models.spec import DecoderSpec, HeadNorms, NormSpec
from octavo.nn.rope_spec import Llama3Scaling

MINIMAX_M2 = {
    "architectures": ["MiniMaxM2ForCausalLM"],
    "attn_type_list": [1] * 62,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 3072,
    "intermediate_size": 1536,
    "max_position_embeddings": 196608,
    "num_attention_heads": 48,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 62,
    "num_key_value_heads": 8,
    "num_local_experts": 256,
    "num_mtp_modules": 3,
    "qk_norm_type": "per_layer",
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "float8_e4m3fn",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": ["gate", "e_score_correction_bias", "lm_head"],
    },
    "rms_norm_eps": 1e-06,
    "rope_theta": 5000000,
    "rotary_dim": 64,
    "scoring_func": "sigmoid",
    "shared_intermediate_size": 0,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_mtp": True,
    "use_qk_norm": True,
    "use_routing_bias": True,
    "vocab_size": 200064,
}
GLM_4_7_FLASH = {
    "architectures": ["Glm4MoeLiteForCausalLM"],
    "attention_bias": False,
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 10240,
    "kv_lora_rank": 512,
    "max_position_embeddings": 202752,
    "moe_intermediate_size": 1536,
    "n_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 20,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 47,
    "num_key_value_heads": 20,
    "num_nextn_predict_layers": 1,
    "partial_rotary_factor": 1.0,
    "q_lora_rank": 768,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "routed_scaling_factor": 1.8,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "v_head_dim": 256,
    "vocab_size": 154880,
}
TRINITY = {
    "architectures": ["AfmoeForCausalLM"],
    "global_attn_every_n_layers": 4,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_position_embeddings": 131072,
    "moe_intermediate_size": 1024,
    "mup_enabled": True,
    "n_group": 1,
    "num_attention_heads": 32,
    "num_dense_layers": 2,
    "num_expert_groups": 1,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 32,
    "num_key_value_heads": 4,
    "num_limited_groups": 1,
    "num_shared_experts": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 10000,
    "route_norm": True,
    "route_scale": 2.826,
    "score_func": "sigmoid",
    "sliding_window": 2048,
    "topk_group": 1,
    "vocab_size": 200192,
}
K_EXAONE = {
    "architectures": ["ExaoneMoEForCausalLM"],
    "first_k_dense_replace": 1,
    "head_dim": 128,
    "hidden_size": 6144,
    "intermediate_size": 18432,
    "max_position_embeddings": 262144,
    "moe_intermediate_size": 2048,
    "n_group": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 64,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 8,
    "num_nextn_predict_layers": 1,
    "num_shared_experts": 1,
    "rms_norm_eps": 1e-05,
    "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"},
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "sliding_window": 128,
    "sliding_window_pattern": "LLLG",
    "topk_group": 1,
    "vocab_size": 153600,
}
SOLAR_OPEN = {
    "architectures": ["SolarOpenForCausalLM"],
    "first_k_dense_replace": 0,
    "head_dim": 128,
    "hidden_size": 4096,
    "max_position_embeddings": 131072,
    "moe_intermediate_size": 1280,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 64,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 65536},
    "rope_theta": 1000000,
    "use_qk_norm": False,
    "vocab_size": 196608,
}
HUNYUAN_A13B = {
    "architectures": ["HunYuanMoEV1ForCausalLM"],
    "attention_head_dim": 128,
    "head_dim": 128,
    "hidden_size": 4096,
    "intermediate_size": 3072,
    "max_position_embeddings": 32768,
    "mlp_bias": False,
    "moe_intermediate_size": [3072] * 32,
    "moe_layer_num_skipped": 0,
    "moe_topk": [8] * 32,
    "num_attention_heads": 32,
    "num_experts": 64,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "num_shared_expert": [1] * 32,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {"alpha": 1000.0, "beta_fast": 32, "beta_slow": 1, "factor": 1.0, "type": "dynamic"},
    "rope_theta": 10000.0,
    "use_cla": False,
    "use_qk_norm": True,
    "vocab_size": 128167,
}
HY3 = {
    "architectures": ["HYV3ForCausalLM"],
    "first_k_dense_replace": 1,
    "head_dim": 128,
    "hidden_size": 4096,
    "intermediate_size": 13312,
    "max_position_embeddings": 131072,
    "moe_intermediate_size": 1536,
    "num_attention_heads": 64,
    "num_experts": 192,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 80,
    "num_key_value_heads": 8,
    "num_shared_experts": 1,
    "rms_norm_eps": 1e-05,
    "router_scaling_factor": 2.826,
    "vocab_size": 120832,
}


MISTRAL_SMALL_4: dict[str, Any] = {
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "kv_lora_rank": 256,
    "max_position_embeddings": 1048576,
    "model_type": "mistral4",
    "moe_intermediate_size": 2048,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "num_attention_heads": 32,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 36,
    "q_lora_rank": 1024,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 64,
    "rope_parameters": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 128.0,
        "llama_4_scaling_beta": 0.1,
        "max_position_embeddings": 1048576,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_theta": 10000.0,
        "type": "yarn",
    },
    "v_head_dim": 128,
    "vocab_size": 131072,
}


def experts_of(spec: DecoderSpec) -> tuple[int, ExpertsSpec]:
    """The number of dense layers in front, and the experts of the others."""
    first = next(i for i, mlp in enumerate(spec.mlps) if isinstance(mlp, ExpertsSpec))
    assert all(isinstance(mlp, MlpSpec) for mlp in spec.mlps[:first])
    (experts,) = set(spec.mlps[first:])
    assert isinstance(experts, ExpertsSpec)
    return first, experts


def test_minimax_m2() -> None:
    spec = spec_of(MINIMAX_M2)
    assert spec.head_norms == HeadNorms(NormSpec(1e-6), "all")
    assert (spec.rope.rotary_dim, spec.rope.width, spec.rope.theta) == (64, 128, 5e6)
    dense, experts = experts_of(spec)
    routing = experts.routing
    assert (dense, experts.num_experts, experts.size, experts.shared) == (0, 256, 1536, None)
    assert (routing.scores, routing.corrected, routing.normalized, routing.top_k) == ("sigmoid", True, True, 8)


def test_glm_4_7_flash() -> None:
    spec = spec_of(GLM_4_7_FLASH)
    (mixer,) = set(spec.mixers)
    assert isinstance(mixer, LatentSelfAttention)
    assert (mixer.rank, mixer.query_rank, mixer.nope_dim, mixer.rope_dim, mixer.value_dim) == (512, 768, 192, 64, 256)
    assert spec.rope.interleaved
    assert spec.norm == NormSpec(1e-5)
    dense, experts = experts_of(spec)
    assert (dense, experts.num_experts, experts.routing.scaling) == (1, 64, 1.8)
    assert experts.shared is not None
    assert experts.shared.size == 1536


@pytest.mark.parametrize("stated", [True, False])
def test_mistral_small_4(stated: bool) -> None:
    """A text half may leave out what are its defaults; a checkpoint of its own names its architecture."""
    text = MISTRAL_SMALL_4 if stated else {"model_type": "mistral4"}
    spec = spec_of({"architectures": ["Mistral3ForConditionalGeneration"], "text_config": text})
    alone = spec_of(MISTRAL_SMALL_4 | {"architectures": ["Mistral4ForCausalLM"]})
    assert replace(spec, stored=alone.stored) == alone
    (mixer,) = set(spec.mixers)
    assert isinstance(mixer, LatentSelfAttention)
    assert mixer.temperature == Temperature(8192, 0.1, first=0)
    assert (spec.rope.rotary_dim, spec.max_position) == (64, 1048576)
    dense, experts = experts_of(spec)
    assert (dense, experts.num_experts, experts.routing.scores) == (0, 128, "softmax")


def test_the_share_of_rotated_channels_of_mistral_small_4_follows_from_their_number() -> None:
    rope = MISTRAL_SMALL_4["rope_parameters"]
    config = MISTRAL_SMALL_4 | {"architectures": ["Mistral4ForCausalLM"]}
    assert spec_of(config | {"rope_parameters": rope | {"partial_rotary_factor": 0.5}}).rope.rotary_dim == 64
    with pytest.raises(ConfigError, match=r"partial_rotary_factor=0\.25"):
        spec_of(config | {"rope_parameters": rope | {"partial_rotary_factor": 0.25}})


def test_trinity() -> None:
    spec = spec_of(TRINITY)
    assert spec.windows[:4] == (2048, 2048, 2048, None)
    assert [rope.rotary_dim for rope in spec.ropes[:4]] == [128, 128, 128, 0]
    assert spec.multipliers.embedding == 2048**0.5
    dense, experts = experts_of(spec)
    assert (dense, experts.num_experts, experts.routing.scaling) == (2, 128, 2.826)


def test_k_exaone() -> None:
    """Older configurations and transformers spell the architecture in two ways."""
    spec = spec_of(K_EXAONE)
    assert spec == spec_of(K_EXAONE | {"architectures": ["ExaoneMoeForCausalLM"]})
    assert spec.windows[:4] == (128, 128, 128, None)
    assert [rope.rotary_dim for rope in spec.ropes[:4]] == [128, 128, 128, 0]
    assert spec.norms.before_mixer == "input_layernorm"
    dense, experts = experts_of(spec)
    assert (dense, experts.num_experts, experts.routing.scaling) == (1, 128, 2.5)


def test_solar_open() -> None:
    """It has no dense layers; its configuration states no size of them."""
    spec = spec_of(SOLAR_OPEN)
    assert spec.head_norms is None
    assert spec.max_position == 131072
    assert experts_of(spec)[0] == 0


def test_hunyuan_a13b() -> None:
    spec = spec_of(HUNYUAN_A13B)
    assert spec.head_norms == HeadNorms(NormSpec(1e-5), rotated=True)
    assert not spec.fuses_head_norms
    assert spec.rope.scaling is None
    assert spec.rope.theta == pytest.approx(11158839.925)
    dense, experts = experts_of(spec)
    assert (dense, experts.num_experts, experts.size, experts.routing.top_k) == (0, 64, 3072, 8)
    assert experts.shared is not None
    assert experts.shared.size == 3072
    with pytest.raises(ConfigError, match=r"moe_topk=.* one number for all layers"):
        spec_of(HUNYUAN_A13B | {"moe_topk": [1, *[8] * 31]})


def test_hy3() -> None:
    spec = spec_of(HY3)
    assert spec.rope.theta == 11158840.0
    assert spec.head_norms == HeadNorms(NormSpec(1e-5))
    assert experts_of(spec)[0] == 1


@pytest.mark.parametrize(
    "config", [GLM_4_7_FLASH, K_EXAONE, HY3, SOLAR_OPEN], ids=lambda config: config["architectures"][0]
)
def test_a_list_of_feed_forwards_comes_before_the_number_of_dense_layers(config: dict[str, Any]) -> None:
    layers = config["num_hidden_layers"]
    types = ["dense"] * 3 + ["sparse"] * (layers - 3)
    assert experts_of(spec_of({"intermediate_size": 64, **config, "mlp_layer_types": types}))[0] == 3
    with pytest.raises(ModelFileError, match=f"lists {layers - 1} mlp_layer_types for {layers} layers"):
        spec_of(config | {"mlp_layer_types": types[1:]})
    with pytest.raises(ConfigError, match="mlp_layer_types shared; Octavo supports dense and sparse"):
        spec_of(config | {"mlp_layer_types": ["shared", *types[1:]]})


@pytest.mark.parametrize(
    ("config", "field", "value"),
    [
        (MINIMAX_M2, "scoring_func", "softmax"),
        (MINIMAX_M2, "qk_norm_type", "per_head"),
        (MINIMAX_M2, "attn_type_list", [0] + [1] * 61),
        (GLM_4_7_FLASH, "scoring_func", "softmax"),
        (TRINITY, "score_func", "softmax"),
        (TRINITY, "num_expert_groups", 2),
        (K_EXAONE, "scoring_func", "softmax"),
        (SOLAR_OPEN, "use_qk_norm", True),
        (HUNYUAN_A13B, "use_cla", True),
        (HUNYUAN_A13B, "moe_layer_num_skipped", 1),
    ],
)
def test_what_other_sizes_may_have_is_refused(config: dict[str, Any], field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"asks for {field}="):
        spec_of(config | {field: value})


_MINISTRAL = {
    "architectures": ["MinistralForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "max_position_embeddings": 256,
    "num_attention_heads": 8,
    "num_hidden_layers": 2,
    "vocab_size": 50,
}


_COMMAND = _MINISTRAL | {
    "architectures": ["Cohere2MoeForCausalLM"],
    "first_k_dense_replace": 1,
    "num_experts": 4,
    "num_hidden_layers": 6,
    "prefix_dense_intermediate_size": 80,
}


def test_the_layers_of_command() -> None:
    """The pattern of windows begins behind the dense layers, which by default have rotary positions and no window."""
    spec = spec_of(_COMMAND)
    assert spec.windows == (None, 4096, 4096, 4096, None, 4096)
    assert [rope.rotary_dim for rope in spec.ropes] == [128, 128, 128, 128, 0, 128]
    assert spec.norm == NormSpec(1e-5, "layer")
    dense, experts = experts_of(spec)
    assert (dense, spec.mlps[0], experts.size, experts.shared) == (1, MlpSpec(80), 96, None)
    assert (experts.routing.scores, experts.routing.scaling) == ("chosen", 1.0)
    spec = spec_of(_COMMAND | {"first_k_dense_replace": 3, "prefix_dense_sliding_window_pattern": 2})
    assert spec.windows == (4096, None, 4096, 4096, 4096, 4096)
    assert [rope.rotary_dim for rope in spec.ropes] == [128, 0, 128, 128, 128, 128]


@pytest.mark.parametrize(("combined", "share"), [("average", 0.5), ("sum", 1.0)])
def test_how_command_combines_experts(combined: str, share: float) -> None:
    fields = {"num_shared_experts": 2, "expert_selection_fn": "sigmoid", "rms_norm_eps": 1e-6}
    spec = spec_of(_COMMAND | fields | {"shared_expert_combination_strategy": combined})
    _, experts = experts_of(spec)
    assert experts.shared is not None
    assert (experts.shared.size, experts.shared.scale, experts.routing.scaling) == (192, share, share)
    assert (experts.routing.scores, experts.routing.normalized) == ("sigmoid", True)
    assert spec.norm == NormSpec(1e-6)


@pytest.mark.parametrize("field", ["expert_selection_fn", "shared_expert_combination_strategy"])
def test_another_combination_is_named(field: str) -> None:
    with pytest.raises(ConfigError, match=f"{field}='max'; Octavo supports"):
        spec_of(_COMMAND | {field: "max"})


def test_ropes_of_mellum() -> None:
    mellum = _MINISTRAL | {
        "architectures": ["MellumForCausalLM"],
        "layer_types": ["sliding_attention", "full_attention"],
        "moe_intermediate_size": 16,
    }
    spec = spec_of(mellum)
    assert spec.windows == (1024, None)
    assert [rope.theta for rope in spec.ropes] == [10000.0, 500000.0]
    assert experts_of(spec)[1].routing.scores == "chosen"


def test_iquest_coder_without_its_options() -> None:
    coder = _MINISTRAL | {"architectures": ["IQuestCoderForCausalLM"]}
    assert spec_of(coder).head_dim == 128
    for field, value in (("clip_qkv", 8.0), ("use_sliding_window", True)):
        with pytest.raises(ConfigError, match=f"asks for {field}={value}"):
            spec_of(coder | {field: value})


def test_apertus_as_published() -> None:
    """It has one of Llama 3's scalings by default; a file in GGUF has the activation's parameters as metadata."""
    apertus = _MINISTRAL | {"architectures": ["ApertusForCausalLM"], "hidden_act": "xielu", "qk_norm": True}
    spec = spec_of(apertus)
    assert spec.rope.theta == 12e6
    assert spec.rope.scaling == Llama3Scaling(8.0, 1.0, 4.0, 8192)
    assert set(spec.mlps) == {MlpSpec(96, "xielu", gated=False)}
    stated = spec_of(apertus | {"xielu_parameters": [[0.1, 0.2, 0.5, -1e-6]] * 2})
    assert set(stated.mlps) == {MlpSpec(96, "xielu", gated=False, curve=(0.1, 0.2, 0.5, -1e-6))}
    with pytest.raises(ModelFileError, match="1 parameters of xIELU for 2 layers"):
        spec_of(apertus | {"xielu_parameters": [[0.1, 0.2, 0.5, -1e-6]]})
    with pytest.raises(ConfigError, match="asks for hidden_act='silu'"):
        spec_of(apertus | {"hidden_act": "silu"})


@pytest.mark.parametrize(
    ("fields", "windows"),
    [
        ({}, (4096, 4096)),
        ({"sliding_window": None}, (None, None)),
        ({"sliding_window": 9, "layer_types": ["full_attention", "sliding_attention"]}, (None, 9)),
    ],
)
def test_windows_of_ministral(fields: dict[str, Any], windows: tuple[int | None, ...]) -> None:
    assert spec_of(_MINISTRAL | fields).windows == windows


def test_bases_of_rotation_per_layer() -> None:
    granite = _MINISTRAL | {"architectures": ["GraniteSWAForCausalLM"], "layer_rope_theta": [0, 500.0]}
    spec = spec_of(granite)
    assert spec.sinks
    assert spec.tied
    assert spec.windows == (None, 128)
    assert [(rope.rotary_dim, rope.theta) for rope in spec.ropes] == [(0, 10000.0), (8, 500.0)]
    with pytest.raises(ModelFileError, match="lists 1 values of layer_rope_theta for 2 layers"):
        spec_of(granite | {"layer_rope_theta": [1.0]})
