"""Tencent's Hunyuan and Hy."""

from __future__ import annotations

from octavo.models.families.experts import FUSED
from octavo.models.families.moe import after_dense
from octavo.models.hf_config import Config, WithDefaults, only, value_or, whole
from octavo.models.hf_decoder import bias_set, decoder_spec, head_size, rms_norm
from octavo.models.hf_rope import rope_spec
from octavo.models.spec import DecoderSpec, HeadNorms, StoredModule, StoredNames, renamed
from octavo.nn.experts_spec import RoutingSpec

_CORRECTION = "layers.{}.mlp.gate.e_score_correction_bias"
_HY3 = StoredNames(
    modules=(
        *renamed(
            {
                "layers.{}.mlp.router.gate": "layers.{}.mlp.gate",
                "layers.{}.mlp.expert_bias": _CORRECTION,
                "layers.{}.mlp.e_score_correction_bias": _CORRECTION,  # in transformers 5
            }
        ),
        *(
            StoredModule(f"layers.{{}}.mlp.shared_mlp.{part}_proj", (f"layers.{{}}.mlp.shared_experts.{part}_proj",))
            for part in ("gate", "up", "down")
        ),
    ),
    stacks=FUSED,
)


def hy3(config: Config) -> DecoderSpec:
    """Hy3 (https://huggingface.co/tencent/Hy3-preview)."""
    only(config, "mlp_bias", False)
    norm, head_dim = rms_norm(config, default=1e-5), head_size(config, 128)
    routing = RoutingSpec(
        top_k=whole(config, "num_experts_per_tok", 8),
        scores="sigmoid",
        corrected=True,
        normalized=True,
        scaling=float(value_or(config, "router_scaling_factor", 2.826)),
    )
    named = WithDefaults(config, n_shared_experts=value_or(config, "num_shared_experts", 1))
    return decoder_spec(
        config,
        head_dim=head_dim,
        norm=norm,
        rope=rope_spec(config, head_dim, theta=11158840.0),
        head_norms=HeadNorms(norm),
        mlps=after_dense(named, routing, 1, 192),
        biases=bias_set(config, mlp=""),
        stored=_HY3,
    )
