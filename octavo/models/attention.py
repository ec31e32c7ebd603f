"""Parameters of attention layers, from a decoder's spec."""

from __future__ import annotations

import math
from dataclasses import replace

from octavo.models.mixers.spec import LatentSelfAttention
from octavo.models.spec import DecoderSpec
from octavo.nn.attention.base import AttentionSpec
from octavo.nn.latent.base import LatentSpec
from octavo.nn.shard import Heads
from octavo.parallel.mesh import ALONE, Mesh


def attention_spec(spec: DecoderSpec, layer: int, mesh: Mesh = ALONE) -> AttentionSpec:
    """Return the parameters of a layer's attention on this rank."""
    heads = Heads(*spec.heads_of(layer))
    own = heads.local(mesh)
    slopes = alibi_slopes(spec.num_heads)[mesh.rank * own.heads : (mesh.rank + 1) * own.heads]
    return AttentionSpec(
        num_heads=own.heads,
        num_kv_heads=own.kv_heads,
        head_dim=heads.head_dim,
        scale=heads.head_dim**-0.5 if spec.scale is None else spec.scale,
        window=spec.windows[layer],
        chunked=spec.chunked and spec.windows[layer] is not None,
        sinks=spec.sinks,
        soft_cap=spec.attention_cap,
        slopes=tuple(spec.alibi * slope for slope in slopes) if spec.alibi else None,
    )


def latent_spec(spec: DecoderSpec, layer: int, mesh: Mesh = ALONE) -> LatentSpec:
    """Return the parameters of a layer's latent attention on this rank."""
    own = spec.mixer_of(layer)
    assert isinstance(own, LatentSelfAttention)
    return LatentSpec(
        num_heads=Heads(spec.num_heads, 1, own.query_dim).local(mesh).heads,
        rank=own.rank,
        rope_dim=own.rope_dim,
        nope_dim=own.nope_dim,
        value_dim=own.value_dim,
        scale=spec.attention_scale,
    )


def widest_attention(spec: DecoderSpec, mesh: Mesh = ALONE) -> AttentionSpec | LatentSpec:
    """Return the parameters of a layer with the largest heads, and of these one with a window, if any has one: those
    that ask most of a backend. A model without attention has parameters all the same, which need not be divisible by
    the ranks."""
    latent = (i for i in range(spec.num_layers) if isinstance(spec.mixer_of(i), LatentSelfAttention))
    if (first := next(latent, None)) is not None:
        return latent_spec(spec, first, mesh)
    if not spec.attention_layers:
        plain = replace(spec, mixers=())
        return attention_spec(plain, 0)
    widest = max(spec.attention_layers, key=lambda layer: (spec.heads_of(layer)[2], spec.windows[layer] is not None))
    return attention_spec(spec, widest, mesh)


def alibi_slopes(heads: int) -> tuple[float, ...]:
    """Return each head's slope: 2 ** (-8 i / heads) for powers of two (Press et al. 2022), else those of the power
    below, and every other one of the power above."""
    below = 2 ** math.floor(math.log2(heads))
    slopes = [2.0 ** (-8 * (i + 1) / below) for i in range(below)]
    more = [2.0 ** (-8 * (i + 1) / (2 * below)) for i in range(0, 2 * (heads - below), 2)]
    return (*slopes, *more)
