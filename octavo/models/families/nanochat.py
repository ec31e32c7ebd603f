"""nanochat."""

from __future__ import annotations

from octavo.models.hf_config import Config
from octavo.models.hf_decoder import activation, bias_set, decoder_spec, head_size, mlp_spec, rms_norm
from octavo.models.hf_rope import rope_spec
from octavo.models.spec import DecoderSpec, HeadNorms, StoredNames, renamed

_STORED = StoredNames(
    modules=renamed({"layers.{}.mlp.fc1": "layers.{}.mlp.up_proj", "layers.{}.mlp.fc2": "layers.{}.mlp.down_proj"})
)


def nanochat(config: Config) -> DecoderSpec:
    """nanochat (https://github.com/karpathy/nanochat): norms without weights, also of embeddings, and of queries and
    keys; squared ReLU; heads are rotated backwards."""
    norm, cap = rms_norm(config, scaled=False), config.get("final_logit_softcapping", 15.0)
    return decoder_spec(
        config,
        norm=norm,
        embedding_norm=norm,
        rope=rope_spec(config, head_size(config), backwards=True),
        head_norms=HeadNorms(norm),  # before or after the rotation, since they have no weights
        mlp=mlp_spec(config, activation(config, default="relu2"), gated=False),
        logit_cap=None if cap is None else float(cap),
        biases=bias_set(config, mlp=""),
        stored=_STORED,
    )
