"""Configurations of encoders: what is refused, and how."""

from __future__ import annotations

from typing import Any

import pytest

from octavo.core.errors import ConfigError
from octavo.models.encoders.registry import encoder_spec


@pytest.mark.parametrize(
    ("architecture", "fields", "message"),
    [
        ("BertModel", {"hidden_act": "silu"}, "hidden_act='silu'; Octavo supports gelu, gelu_new,.*relu"),
        ("ModernBertModel", {"hidden_activation": "silu"}, "hidden_activation='silu'; Octavo supports gelu, gelu_new"),
        ("BertModel", {"is_decoder": True}, "is_decoder=True"),
        ("BertModel", {"position_embedding_type": "relative_key"}, "position_embedding_type='relative_key'"),
        ("DistilBertModel", {"sinusoidal_pos_embds": True}, "sinusoidal_pos_embds=True"),
        ("NomicBertModel", {"prenorm": True}, "prenorm=True"),
    ],
)
def test_other_arithmetic_is_refused_with_what_there_is(
    architecture: str, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        encoder_spec({"architectures": [architecture], **fields})
