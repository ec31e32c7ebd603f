"""Mistral: Llama with a sliding window on every layer, in the versions that have one."""

from __future__ import annotations

from octavo.models.hf_config import Config, only, whole
from octavo.models.hf_decoder import decoder_spec
from octavo.models.spec import DecoderSpec


def mistral(config: Config) -> DecoderSpec:
    """Mistral 7B and its successors of the same architecture (https://arxiv.org/abs/2310.06825).

    An absent `sliding_window` means 4096, as in the first version; null means none.
    """
    only(config, "layer_types", None)
    window = None if config.get("sliding_window", 4096) is None else whole(config, "sliding_window", 4096)
    return decoder_spec(config, windows=[window] * whole(config, "num_hidden_layers"))
