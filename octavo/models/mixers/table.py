"""Kind of mixer -> its module."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from octavo.models.mixers.attention import Attention
from octavo.models.mixers.base import Mixer
from octavo.models.mixers.gated_delta import GatedDelta
from octavo.models.mixers.latent import LatentAttention
from octavo.models.mixers.mamba import Mamba
from octavo.models.mixers.mamba2 import Mamba2
from octavo.models.mixers.shared_attention import SharedAttention
from octavo.models.mixers.short_conv import ShortConv
from octavo.models.mixers.spec import (
    GatedDeltaSpec,
    LatentSelfAttention,
    Mamba2Spec,
    MambaSpec,
    MixerSpec,
    SelfAttention,
    SharedSelfAttention,
    ShortConvSpec,
)
from octavo.models.spec import DecoderSpec
from octavo.nn.build import Build
from octavo.nn.rope import Rope


class MixerFactory(Protocol):
    """Makes the mixer of a layer, whose entry in `DecoderSpec.mixers` has the parameters."""

    def __call__(self, b: Build, spec: DecoderSpec, layer: int, rope: Rope) -> Mixer: ...


MIXERS: Mapping[type[MixerSpec], MixerFactory] = {
    LatentSelfAttention: LatentAttention,
    SelfAttention: Attention,
    SharedSelfAttention: SharedAttention,
    Mamba2Spec: Mamba2,
    MambaSpec: Mamba,
    GatedDeltaSpec: GatedDelta,
    ShortConvSpec: ShortConv,
}


def make_mixer(b: Build, spec: DecoderSpec, layer: int, rope: Rope) -> Mixer | None:
    """Make a layer's mixer below the layer's place; None if the layer has only a feed-forward."""
    kind = spec.mixer_of(layer)
    return None if kind is None else MIXERS[type(kind)](b.at(kind.path), spec, layer, rope)
