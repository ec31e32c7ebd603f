"""Where configurations of models with several halves state what concerns the text half."""

from __future__ import annotations

from octavo.hub.text_config import quantization_config, stored_dtype, text_config, with_halves

THINKER = {"audio_config": {"d_model": 8}, "text_config": {"hidden_size": 4}, "dtype": "bfloat16"}
OUTER = {"architectures": ["A"], "model_type": "a", "thinker_config": THINKER | {"architectures": ["B"]}}


def test_halves_within_another_configuration() -> None:
    assert text_config(OUTER) == {"hidden_size": 4}
    assert with_halves(OUTER)["audio_config"] == {"d_model": 8}
    assert with_halves(OUTER)["architectures"] == ["A"]
    assert stored_dtype(OUTER) == "bfloat16"
    method = {"quant_method": "fp8"}
    assert quantization_config({"thinker_config": THINKER | {"quantization_config": method}}) == method


def test_a_text_models_own_configuration() -> None:
    assert text_config({"hidden_size": 4}) == {"hidden_size": 4}
    assert with_halves({"hidden_size": 4}) == {"hidden_size": 4}
