"""Architecture name -> encoder. Adding a family is a line here, for each head that its checkpoints come with."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set

import torch

from octavo.models.encoders.bert import bert, distilbert, roberta
from octavo.models.encoders.encoder import Encoder
from octavo.models.encoders.spec import EncoderSpec
from octavo.models.hf_config import Config
from octavo.nn.build import Build
from octavo.nn.quant.none import Unquantised

_FAMILIES: Mapping[str, Callable[[Config], EncoderSpec]] = {
    "Bert": bert,
    "Roberta": roberta,
    "XLMRoberta": roberta,
    "Camembert": roberta,
    "DistilBert": distilbert,
}
_FORMS = ("Model", "ForMaskedLM", "ForSequenceClassification")

ENCODERS: Mapping[str, Callable[[Config], EncoderSpec]] = {
    family + form: spec for family, spec in _FAMILIES.items() for form in _FORMS
}


def is_encoder(config: Config) -> bool:
    """Whether the configuration is that of an encoder which Octavo knows."""
    return (config.get("architectures") or [None])[0] in ENCODERS


def encoder_spec(config: Config) -> EncoderSpec:
    """A checkpoint's configuration as an `EncoderSpec`.

    Raises:
        ConfigError: a feature that the configuration asks for is not supported.
        ModelFileError: a field is missing or senseless.
    """
    return ENCODERS[config["architectures"][0]](config)


def build_encoder(
    config: Config, *, dtype: torch.dtype, device: torch.device, scheme: type[Unquantised], stored: Set[str]
) -> Encoder:
    """The encoder that a configuration describes, without weights.

    Args:
        stored: the checkpoint's names, by which it is seen whether the family's root stands before them.

    Raises:
        ConfigError, ModelFileError: as `encoder_spec`.
    """
    spec = encoder_spec(config)
    bare = not any(name.startswith(f"{spec.names.root}.") for name in stored)
    return Encoder(Build(dtype, device, None, scheme), spec, "" if bare else spec.names.root)
