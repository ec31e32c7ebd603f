"""MiniMax."""

from __future__ import annotations

from octavo.models.families.experts import FUSED, experts_of, separate
from octavo.models.hf_config import Config, only, value_or, whole
from octavo.models.hf_decoder import decoder_spec, rms_norm
from octavo.models.hf_rope import rope_spec
from octavo.models.spec import DecoderSpec, HeadNorms, StoredNames, renamed
from octavo.nn.experts_spec import RoutingSpec

_BLOCK, _CORRECTION = "layers.{}.block_sparse_moe", "layers.{}.mlp.gate.e_score_correction_bias"
_M2 = StoredNames(
    modules=renamed(
        {
            f"{_BLOCK}.gate": "layers.{}.mlp.gate",
            f"{_BLOCK}.e_score_correction_bias": _CORRECTION,
            "layers.{}.mlp.e_score_correction_bias": _CORRECTION,  # in transformers 5
            **separate(f"{_BLOCK}.experts", "w1", "w3", "w2"),
        }
    ),
    stacks=FUSED,
)


def minimax_m2(config: Config) -> DecoderSpec:
    """MiniMax-M2, M2.1 and M2.5 (https://huggingface.co/MiniMaxAI/MiniMax-M2): norms over all queries and keys, experts
    in all layers."""
    only(config, "scoring_func", "sigmoid")
    only(config, "use_qk_norm", True)
    only(config, "qk_norm_type", "per_layer")
    only(config, "shared_intermediate_size", 0)
    only(config, "sliding_window", None)
    layers, head_dim = whole(config, "num_hidden_layers"), whole(config, "head_dim", 128)
    only(config, "attn_type_list", [1] * layers)
    routing = RoutingSpec(
        top_k=whole(config, "num_experts_per_tok", 8),
        scores="sigmoid",
        corrected=bool(value_or(config, "use_routing_bias", True)),
        normalized=True,
    )
    norm, rotated = rms_norm(config), whole(config, "rotary_dim", head_dim) / head_dim
    return decoder_spec(
        config,
        head_dim=head_dim,
        norm=norm,
        rope=rope_spec(config, head_dim, theta=5000000.0, rotated=rotated),
        head_norms=HeadNorms(norm, "all"),
        mlp=experts_of(config, routing, "num_local_experts", "intermediate_size", 256),
        stored=_M2,
    )
