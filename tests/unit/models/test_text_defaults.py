"""Nested configurations that leave out what equals Transformers' defaults."""

from __future__ import annotations

import json
from typing import Any

import pytest
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from octavo.models.registry import spec_of
from octavo.models.text_defaults import TEXT_DEFAULTS

_OLDER = {"exaone4_5_text": "exaone4"}
"""Names in the first files -> those of transformers."""


def outer(text: dict[str, Any]) -> dict[str, Any]:
    return {"architectures": ["LlavaForConditionalGeneration"], "text_config": text}


@pytest.mark.parametrize("kind", TEXT_DEFAULTS)
def test_a_field_that_is_left_out_has_transformers_default(kind: str) -> None:
    config = CONFIG_MAPPING[_OLDER.get(kind, kind)]()
    stated = json.loads(json.dumps(getattr(config, "text_config", config).to_dict()))
    expected = spec_of(outer({**stated, "model_type": kind}))
    assert spec_of(outer({"model_type": kind})) == expected
    for name in stated.keys() - {"model_type"}:
        assert spec_of(outer({key: value for key, value in stated.items() if key != name})) == expected, name


@pytest.mark.parametrize(
    ("kind", "whole", "text", "tied"),
    [
        ("qwen3", True, False, True),  # transformers 5: the text model has the default
        ("qwen3", False, False, False),
        ("gemma3_text", False, True, False),
        ("gemma3_text", True, True, True),
        ("gemma3_text", False, None, False),
        ("gemma3_text", None, None, True),
        ("qwen2", False, True, True),  # transformers 4: LLaVA-OneVision 0.5B
        ("qwen2", None, True, True),
        ("qwen2", True, None, True),
        ("llama", None, None, False),
        ("gemma3_text", None, False, False),
    ],
)
def test_whether_the_head_is_tied(kind: str, whole: bool | None, text: bool | None, tied: bool) -> None:
    config = outer({"model_type": kind} | ({} if text is None else {"tie_word_embeddings": text}))
    assert spec_of(config | ({} if whole is None else {"tie_word_embeddings": whole})).tied == tied


def test_the_text_half_of_llava_onevision_as_published() -> None:
    """The 0.5B's: neither the context's length nor the norms' epsilon is stated."""
    text = {
        "architectures": ["Qwen2ForCausalLM"],
        "hidden_size": 896,
        "intermediate_size": 4864,
        "model_type": "qwen2",
        "num_attention_heads": 14,
        "num_hidden_layers": 24,
        "num_key_value_heads": 2,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": True,
        "vocab_size": 152000,
    }
    config = {"architectures": ["LlavaOnevisionForConditionalGeneration"], "text_config": text}
    spec = spec_of({**config, "tie_word_embeddings": False})
    assert (spec.max_position, spec.norm.eps, spec.rope.theta, spec.tied) == (32768, 1e-6, 1e6, True)
