"""Models that keep nothing between steps: encoders, and decoders with bidirectional attention."""

from __future__ import annotations

from collections.abc import Set

import torch

from octavo.core.errors import ConfigError
from octavo.models.encoders.bidirectional import BidirectionalDecoder, check_bidirectional
from octavo.models.encoders.encoder import Encoder
from octavo.models.encoders.families import ENCODERS, OwnSpec
from octavo.models.encoders.modernbert import ROOT as MODERN_ROOT
from octavo.models.encoders.modernbert import ModernEncoder, ModernSpec
from octavo.models.encoders.nomic import ROOT as NOMIC_ROOT
from octavo.models.encoders.nomic import NomicEncoder, NomicSpec
from octavo.models.encoders.spec import EncoderSpec
from octavo.models.hf_config import Config, is_bidirectional
from octavo.models.registry import NESTED, is_own, stated_spec
from octavo.models.spec import DecoderSpec
from octavo.nn.attention.whole import WholeAttention
from octavo.nn.build import Build
from octavo.nn.quant.base import everywhere
from octavo.nn.quant.none import Unquantized

Spec = OwnSpec | DecoderSpec


def is_encoder(config: Config) -> bool:
    """Return whether the configuration is of a supported model that keeps nothing between steps."""
    name = (config.get("architectures") or [""])[0]
    return name in ENCODERS or (is_bidirectional(config) and is_own(config) and name not in NESTED)


def encoder_spec(config: Config) -> Spec:
    """Convert a checkpoint's configuration to a spec.

    Raises:
        ConfigError: the configuration has an unsupported feature.
        ModelFileError: a field is missing or invalid.
    """
    name = config["architectures"][0]
    if name in ENCODERS:
        return ENCODERS[name](config)
    spec = stated_spec(config)
    if not spec.bidirectional:
        raise ConfigError(
            f"The model's config asks for use_bidirectional_attention, which {name} does not have; of decoders, "
            "Gemma3TextModel has it."
        )
    check_bidirectional(spec)
    return spec


def build_encoder(
    spec: Spec, *, dtype: torch.dtype, device: torch.device, scheme: type[Unquantized], stored: Set[str]
) -> Encoder | ModernEncoder | NomicEncoder | BidirectionalDecoder:
    """Build the encoder of a spec, without weights.

    Args:
        stored: the checkpoint's tensor names, which show whether they have the family's prefix.
    """
    build = Build(dtype, device, WholeAttention(), everywhere(scheme, dtype, device))

    def found(root: str) -> str:
        return root if any(name.startswith(f"{root}.") for name in stored) else ""

    match spec:
        case ModernSpec():
            return ModernEncoder(build, spec, found(MODERN_ROOT))
        case NomicSpec():
            return NomicEncoder(build, spec, found(NOMIC_ROOT))
        case EncoderSpec():
            return Encoder(build, spec, found(spec.names.root))
        case DecoderSpec():
            return BidirectionalDecoder(build, spec)
