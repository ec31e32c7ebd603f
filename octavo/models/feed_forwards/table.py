"""The module of each kind of feed-forward."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from octavo.models.feed_forwards.base import FeedForward
from octavo.models.feed_forwards.beside import ExpertsBeside
from octavo.models.feed_forwards.experts import Experts
from octavo.models.feed_forwards.mlp import Mlp
from octavo.models.feed_forwards.spec import BesideSpec, ExpertsSpec, MlpSpec
from octavo.models.spec import DecoderSpec
from octavo.nn.build import Build

_MODULES: Mapping[type, Callable[..., FeedForward]] = {
    MlpSpec: Mlp,
    ExpertsSpec: Experts,
    BesideSpec: ExpertsBeside,
}


def make_feed_forward(b: Build, spec: DecoderSpec, layer: int) -> FeedForward | None:
    """Make a layer's feed-forward at the place of `b`; None if the layer has only a mixer."""
    own = spec.mlps[layer]
    if own is None:
        return None
    return _MODULES[type(own)](b, own, spec.hidden_size, bias="mlp" in spec.biases)
