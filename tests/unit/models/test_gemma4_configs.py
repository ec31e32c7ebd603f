"""Configurations of Gemma 4 as published, and what they become."""

from __future__ import annotations

from typing import Any

import pytest

from octavo.core.errors import ConfigError, ModelFileError
from octavo.models.attention import attention_spec, widest_attention
from octavo.models.feed_forwards.spec import BesideSpec
from octavo.models.mixers.spec import SharedSelfAttention
from octavo.models.registry import spec_of
from octavo.models.spec import LayerInputSpec
from octavo.nn.attention.base import AttentionSpec
from octavo.nn.rope_spec import ProportionalScaling

GEMMA4 = {
    "model_type": "gemma4_text",
    "hidden_size": 5376,
    "intermediate_size": 21504,
    "num_hidden_layers": 60,
    "num_attention_heads": 32,
    "num_key_value_heads": 16,
    "num_global_key_value_heads": 4,
    "attention_k_eq_v": True,
    "head_dim": 256,
    "global_head_dim": 512,
    "sliding_window": 1024,
    "max_position_embeddings": 262144,
    "hidden_size_per_layer_input": 0,
    "final_logit_softcapping": 30.0,
    "use_bidirectional_attention": "vision",
}


def gemma4(**changes: Any) -> Any:
    text = {**GEMMA4, **changes}
    return spec_of({"architectures": ["Gemma4ForConditionalGeneration"], "text_config": text})


def test_a_dense_gemma4() -> None:
    spec = gemma4()
    assert [spec.heads_of(i) for i in (4, 5, 59)] == [(32, 16, 256), (32, 4, 512), (32, 4, 512)]
    assert spec.windows[4:7] == (1024, None, 1024)
    assert spec.rope_of(5).scaling == ProportionalScaling(64)
    assert (spec.rope_of(5).rotary_dim, spec.rope_of(5).theta) == (512, 1000000.0)
    assert (spec.rope_of(4).rotary_dim, spec.rope_of(4).theta) == (256, 10000.0)
    assert spec.attention_scale == 1.0
    assert spec.layer_scales
    assert spec.layer_inputs is None
    assert len([one for one in spec.stored.modules if "v_proj" in one.names[-1]]) == 10
    widest = widest_attention(spec)
    assert isinstance(widest, AttentionSpec)
    assert attention_spec(spec, 5).head_dim == widest.head_dim == 512
    assert gemma4(attention_k_eq_v=False).heads_of(5) == (32, 16, 512)


def test_a_gemma4_with_experts() -> None:
    spec = gemma4(enable_moe_block=True, num_experts=128, top_k_experts=8, moe_intermediate_size=704)
    (mlp,) = set(spec.mlps)
    assert isinstance(mlp, BesideSpec)
    assert (mlp.mlp.size, mlp.experts.size, mlp.experts.routing.top_k) == (21504, 704, 8)


def test_a_small_gemma4() -> None:
    """Its last layers read the keys and values of the last ones of their type before them."""
    changes = {"num_hidden_layers": 35, "num_kv_shared_layers": 20, "use_double_wide_mlp": True}
    types = (["sliding_attention"] * 4 + ["full_attention"]) * 7
    spec = gemma4(**changes, layer_types=types, hidden_size_per_layer_input=256, attention_k_eq_v=False)
    shared = [mixer for mixer in spec.mixers if isinstance(mixer, SharedSelfAttention)]
    assert [mixer.source for mixer in shared] == [13, 13, 13, 13, 14] * 4
    assert [mlp and mlp.width for mlp in spec.mlps] == [21504] * 15 + [43008] * 20
    assert spec.layer_inputs == LayerInputSpec(256, 262144, "gelu_tanh")
    assert ".layers.15.self_attn.k_proj.weight" in spec.stored.ignored


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention|later ones|by themselves"),
        ({"num_kv_shared_layers": 56}, "num_kv_shared_layers=56 of 60 layers.*'full_attention'"),
        ({"rope_parameters": {"full_attention": {"rope_type": "yarn"}}}, "rope type 'yarn' in layers of full"),
        ({"per_layer_config": {"5": {"window": 3}}}, "per_layer_config with 'window'"),
        ({"per_layer_config": {"5": {"head_dim": 64}}}, "layers of one type differ"),
        ({"enable_moe_block": True, "num_experts": 4, "moe_intermediate_size": 8}, "top_k_experts"),
    ],
)
def test_gemma4s_that_are_refused(changes: dict[str, Any], found: str) -> None:
    with pytest.raises((ConfigError, ModelFileError), match=found):
        gemma4(**changes)
