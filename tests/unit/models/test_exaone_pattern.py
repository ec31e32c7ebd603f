"""EXAONE 4's pattern of windows, as published configurations spell it."""

from __future__ import annotations

from typing import Any

import pytest

from octavo.core.errors import ModelFileError
from octavo.models.families.exaone import exaone4

CONFIG: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "max_position_embeddings": 128,
    "sliding_window": 16,
}
TYPES = ["sliding_attention"] * 3 + ["full_attention"]


@pytest.mark.parametrize("extra", [{}, {"layer_types": TYPES}])
def test_pattern_spelled_in_letters(extra: dict[str, Any]) -> None:
    spec = exaone4({**CONFIG, "sliding_window_pattern": "LLLG", **extra})
    assert spec.windows == (16, 16, 16, None)


def test_other_letters_are_refused() -> None:
    with pytest.raises(ModelFileError, match="sliding_window_pattern='LGLG'"):
        exaone4({**CONFIG, "sliding_window_pattern": "LGLG"})
