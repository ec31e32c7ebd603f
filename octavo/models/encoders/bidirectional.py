"""Decoders whose tokens attend to later ones, too (EmbeddingGemma, https://arxiv.org/abs/2509.20354; gte-Qwen2)."""

from __future__ import annotations

from dataclasses import replace

from octavo.core.errors import ConfigError
from octavo.models.decoder import CausalLM
from octavo.models.feed_forwards.spec import MlpSpec
from octavo.models.spec import DecoderSpec
from octavo.nn.build import Build


class BidirectionalDecoder(CausalLM):
    """A decoder's layers with the interface of `EncoderModel`. It has no output head.

    Attributes:
        unneeded: prefixes of tensor names that checkpoints have in addition.
    """

    unneeded = ("lm_head.",)

    def __init__(self, b: Build, spec: DecoderSpec) -> None:
        """
        Args:
            b: with `WholeAttention` as its attention backend.
        """
        super().__init__(b, replace(spec, tied=True))
        del self.head


def check_bidirectional(spec: DecoderSpec) -> None:
    """Raise ConfigError for what `WholeAttention` lacks, and for layers that are not known to work so."""
    lacking = {
        "layers other than attention": len(spec.attention_layers) < spec.num_layers,
        "experts": not all(isinstance(mlp, MlpSpec) for mlp in spec.mlps),
        "a soft cap of scores": spec.attention_cap is not None,
        "linear biases of scores": bool(spec.alibi),
        "attention sinks": spec.sinks,
        "windows that do not slide": spec.chunked,
    }
    found = [name for name, present in lacking.items() if present]
    if found:
        raise ConfigError(
            f"The model's config says that tokens attend to later ones, too, and it has {found[0]}, which Octavo does "
            "not have together. Serve another model."
        )
