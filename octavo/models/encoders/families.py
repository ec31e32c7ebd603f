"""Architecture name -> encoder's spec. Adding a family takes one line here; every family has several heads."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from octavo.models.encoders.bert import bert, distilbert, roberta
from octavo.models.encoders.modernbert import ModernSpec, modernbert
from octavo.models.encoders.nomic import NomicSpec, nomic
from octavo.models.encoders.spec import EncoderSpec
from octavo.models.hf_config import Config

OwnSpec = EncoderSpec | ModernSpec | NomicSpec

_FAMILIES: Mapping[str, Callable[[Config], OwnSpec]] = {
    "Bert": bert,
    "Roberta": roberta,
    "XLMRoberta": roberta,
    "Camembert": roberta,
    "DistilBert": distilbert,
    "ModernBert": modernbert,
    "NomicBert": nomic,
}
_FORMS = ("Model", "ForMaskedLM", "ForSequenceClassification")

ENCODERS: Mapping[str, Callable[[Config], OwnSpec]] = {
    family + form: spec for family, spec in _FAMILIES.items() for form in _FORMS
}
