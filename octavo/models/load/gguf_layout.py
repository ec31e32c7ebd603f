"""How GGUF files name and arrange the tensors of a decoder.

llama.cpp's converter gives all families the same names, one order of queries, keys and values, matrices of
[outputs, inputs], and weights of norms that are not offsets from one. So a spec says what a file has.
"""

from __future__ import annotations

from collections.abc import Iterator, Set

from octavo.hub.gguf_names import LAYER, ROOT
from octavo.models.feed_forwards.spec import ExpertsSpec, MlpSpec
from octavo.models.mixers.spec import (
    GatedDeltaSpec,
    LatentSelfAttention,
    Mamba2Spec,
    MambaSpec,
    SelfAttention,
    ShortConvSpec,
)
from octavo.models.spec import DecoderSpec, StoredModule, StoredNames, StoredStack

_FACTORS = ("rope_factors_long.weight", "rope_factors_short.weight")
"""Tensors that are read with the metadata."""
_LATENT = {
    "attn_q_a": "q_a_proj",
    "attn_q_a_norm": "q_a_layernorm",
    "attn_q_b": "q_b_proj",
    "attn_kv_a_mqa": "kv_a_proj_with_mqa",
    "attn_kv_a_norm": "kv_a_layernorm",
    "attn_kv_b": "kv_b_proj",
}
_STATE_SPACE = {
    "ssm_in": "in_proj",
    "ssm_x": "x_proj",
    "ssm_out": "out_proj",
    "ssm_dt_norm": "dt_layernorm",
    "ssm_b_norm": "b_layernorm",
    "ssm_c_norm": "c_layernorm",
}
_PARTS = ("gate", "up", "down")
_STACKS = tuple(
    StoredStack(f"blk.{{}}.ffn_{part}_exps.{kind}", (f"layers.{{}}.mlp.experts.{{}}.{part}_proj.{kind}",))
    for part in _PARTS
    for kind in ("weight", "bias")
)


def gguf_names(spec: DecoderSpec, names: Set[str]) -> StoredNames:
    """Return the names and arrangement of a decoder's tensors in a GGUF file.

    Args:
        names: those of the file's tensors.
    """
    modules = (
        *_root(spec, names),
        *_projections(spec, names),
        *_norms(spec, names),
        *_experts(spec),
        *_recurrent(spec),
        *_gated(spec, names),
    )
    further = f"blk.{spec.num_layers}."  # layers that predict further tokens
    alternating = any(name.endswith(".ssm_beta.weight") for name in names)  # Qwen3.5's, unlike Qwen3-Next's
    return StoredNames("", modules, _FACTORS, _STACKS, (further,), alternating_heads=alternating)


def _root(spec: DecoderSpec, names: Set[str]) -> Iterator[StoredModule]:
    for theirs, ours in ROOT.items():
        if theirs == "token_embd_norm" and "output_norm.weight" not in names:  # LFM2's final norm
            ours = "norm"
        shift = -spec.norm.offset if ours == "norm" else 0.0
        yield StoredModule(theirs, (ours,), shift=shift)


def _projections(spec: DecoderSpec, names: Set[str]) -> Iterator[StoredModule]:
    shift = -spec.head_norms.norm.offset if spec.head_norms else 0.0
    for theirs, ours in LAYER.items():
        is_norm = theirs.endswith("_norm")
        yield StoredModule(f"blk.{{}}.{theirs}", (f"layers.{{}}.{ours}",), shift=shift if is_norm else 0.0)
    kv = spec.num_kv_heads * spec.head_dim
    qkv = tuple(f"layers.{{}}.self_attn.{part}_proj" for part in "qkv")
    yield StoredModule("blk.{}.attn_qkv", qkv, (spec.num_heads * spec.head_dim, kv, kv))
    if any(isinstance(mixer, LatentSelfAttention) for mixer in spec.mixers):
        for theirs, ours in _LATENT.items():
            yield StoredModule(f"blk.{{}}.{theirs}", (f"layers.{{}}.self_attn.{ours}",))
    if spec.sinks:
        yield StoredModule("blk.{}.attn_sinks.weight", ("layers.{}.self_attn.sinks",))
    mlp = spec.mlps[0]
    if isinstance(mlp, MlpSpec) and mlp.gated and "blk.0.ffn_gate.weight" not in names:
        gate_up = ("layers.{}.mlp.gate_proj", "layers.{}.mlp.up_proj")
        yield StoredModule("blk.{}.ffn_up", gate_up, (mlp.width,) * 2)


def _experts(spec: DecoderSpec) -> Iterator[StoredModule]:
    """Yield routers, and shared experts."""
    experts = next((mlp for mlp in spec.mlps if isinstance(mlp, ExpertsSpec)), None)
    if experts is None:
        return
    yield StoredModule("blk.{}.ffn_gate_inp", ("layers.{}.mlp.gate",))
    yield StoredModule("blk.{}.exp_probs_b.bias", ("layers.{}.mlp.gate.e_score_correction_bias",))
    if experts.shared is not None:
        for part in _PARTS:
            yield StoredModule(f"blk.{{}}.ffn_{part}_shexp", (f"layers.{{}}.mlp.{experts.shared.name}.{part}_proj",))
        yield StoredModule("blk.{}.ffn_gate_inp_shexp", (f"layers.{{}}.mlp.{experts.shared.gate}",))


def _recurrent(spec: DecoderSpec) -> Iterator[StoredModule]:
    """Yield state spaces and short convolutions."""
    kinds = {type(mixer) for mixer in spec.mixers}
    if ShortConvSpec in kinds:
        yield StoredModule("blk.{}.shortconv.conv", ("layers.{}.conv.conv",), form="taps")
        for part in ("in_proj", "out_proj"):
            yield StoredModule(f"blk.{{}}.shortconv.{part}", (f"layers.{{}}.conv.{part}",))
    if not kinds & {MambaSpec, Mamba2Spec}:
        return
    own = "layers.{}.mamba."
    for theirs, ours in _STATE_SPACE.items():
        yield StoredModule(f"blk.{{}}.{theirs}", (own + ours,))
    yield StoredModule("blk.{}.ssm_conv1d", (f"{own}conv1d",), form="taps")
    yield StoredModule("blk.{}.ssm_a", (f"{own}A_log",), form="decay")
    yield StoredModule("blk.{}.ssm_d", (f"{own}D",), form="flat")
    if Mamba2Spec in kinds:
        yield StoredModule("blk.{}.ssm_norm", (f"{own}norm",), form="flat")
        yield StoredModule("blk.{}.ssm_dt.bias", (f"{own}dt_bias",))
    else:
        yield StoredModule("blk.{}.ssm_dt", (f"{own}dt_proj",))


def _gated(spec: DecoderSpec, names: Set[str]) -> Iterator[StoredModule]:
    """Yield gates of attention, which Trinity stores apart, Qwen3-Next and Qwen3.5 beside queries, and the projections
    of gated delta nets, which older files have as the original checkpoint does."""
    delta = next((mixer for mixer in spec.mixers if isinstance(mixer, GatedDeltaSpec)), None)
    gated = any(isinstance(mixer, SelfAttention) and mixer.gated for mixer in spec.mixers)
    if gated and delta is None and "blk.0.attn_gate.weight" in names:
        yield StoredModule("blk.{}.attn_gate", ("layers.{}.self_attn.gate_proj",))
    elif gated:
        both = tuple(f"layers.{{}}.self_attn.{part}_proj" for part in ("q", "gate"))
        yield StoredModule("blk.{}.attn_q", both, (spec.head_dim,) * 2)
    if delta is None:
        return
    own, share = "layers.{}.linear_attn.", delta.heads // delta.key_heads
    keys, values = delta.key_heads * delta.key_dim, delta.heads * delta.head_dim
    qkvz = tuple(f"{own}{part}_proj" for part in "qkvz")
    yield StoredModule("blk.{}.attn_qkv", qkvz[:3], (keys, keys, values))
    yield StoredModule("blk.{}.attn_gate", qkvz[3:])
    yield StoredModule("blk.{}.ssm_in", qkvz, (delta.key_dim,) * 2 + (share * delta.head_dim,) * 2)
    yield StoredModule("blk.{}.ssm_ba", (f"{own}b_proj", f"{own}a_proj"), (share, share))
    yield StoredModule("blk.{}.ssm_beta", (f"{own}b_proj",))
    yield StoredModule("blk.{}.ssm_alpha", (f"{own}a_proj",))
    yield StoredModule("blk.{}.ssm_conv1d", (f"{own}conv1d",), form="taps")
    yield StoredModule("blk.{}.ssm_a", (f"{own}A_log",), form="decay")
    yield StoredModule("blk.{}.ssm_dt.bias", (f"{own}dt_bias",))
    yield StoredModule("blk.{}.ssm_norm", (f"{own}norm",))
    yield StoredModule("blk.{}.ssm_out", (f"{own}out_proj",))


def _norms(spec: DecoderSpec, names: Set[str]) -> Iterator[StoredModule]:
    where = spec.norms
    roles = {
        "attn_norm": where.before_mixer,
        "post_attention_norm": where.after_mixer,
        "ffn_norm": where.before_mlp,
        "post_ffw_norm": where.after_mlp,
    }
    if "blk.0.attn_norm_2.weight" in names:  # Falcon's: attention's own norm
        roles |= {"attn_norm": where.before_mlp, "attn_norm_2": where.before_mixer}
    if where.after_mixer is None and "blk.0.ffn_norm.weight" not in names:  # Seed-OSS names it by its place
        roles["post_attention_norm"] = where.before_mlp
    for theirs, ours in roles.items():
        if ours is not None:
            yield StoredModule(f"blk.{{}}.{theirs}", (f"layers.{{}}.{ours}",), shift=-spec.norm.offset)
