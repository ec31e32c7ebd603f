"""Architecture name -> encoder. Adding a family takes one line here; every family has several heads."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set

import torch

from octavo.models.encoders.bert import bert, distilbert, roberta
from octavo.models.encoders.encoder import Encoder
from octavo.models.encoders.modernbert import ROOT as MODERN_ROOT
from octavo.models.encoders.modernbert import ModernEncoder, ModernSpec, modernbert
from octavo.models.encoders.nomic import ROOT as NOMIC_ROOT
from octavo.models.encoders.nomic import NomicEncoder, NomicSpec, nomic
from octavo.models.encoders.spec import EncoderSpec
from octavo.models.hf_config import Config
from octavo.nn.build import Build
from octavo.nn.quant.base import everywhere
from octavo.nn.quant.none import Unquantized

Spec = EncoderSpec | ModernSpec | NomicSpec

_FAMILIES: Mapping[str, Callable[[Config], Spec]] = {
    "Bert": bert,
    "Roberta": roberta,
    "XLMRoberta": roberta,
    "Camembert": roberta,
    "DistilBert": distilbert,
    "ModernBert": modernbert,
    "NomicBert": nomic,
}
_FORMS = ("Model", "ForMaskedLM", "ForSequenceClassification")

ENCODERS: Mapping[str, Callable[[Config], Spec]] = {
    family + form: spec for family, spec in _FAMILIES.items() for form in _FORMS
}


def is_encoder(config: Config) -> bool:
    """Return whether the configuration is of a supported encoder."""
    return (config.get("architectures") or [None])[0] in ENCODERS


def encoder_spec(config: Config) -> Spec:
    """Convert a checkpoint's configuration to a spec.

    Raises:
        ConfigError: the configuration has an unsupported feature.
        ModelFileError: a field is missing or invalid.
    """
    return ENCODERS[config["architectures"][0]](config)


def build_encoder(
    config: Config, *, dtype: torch.dtype, device: torch.device, scheme: type[Unquantized], stored: Set[str]
) -> Encoder | ModernEncoder | NomicEncoder:
    """Build the encoder of a configuration, without weights.

    Args:
        stored: the checkpoint's tensor names, which show whether they have the family's prefix.

    Raises:
        ConfigError, ModelFileError: as `encoder_spec`.
    """
    spec = encoder_spec(config)
    build = Build(dtype, device, None, everywhere(scheme, dtype, device))

    def found(root: str) -> str:
        return root if any(name.startswith(f"{root}.") for name in stored) else ""

    match spec:
        case ModernSpec():
            return ModernEncoder(build, spec, found(MODERN_ROOT))
        case NomicSpec():
            return NomicEncoder(build, spec, found(NOMIC_ROOT))
        case EncoderSpec():
            return Encoder(build, spec, found(spec.names.root))
