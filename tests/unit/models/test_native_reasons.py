"""What keeps a model from running as a native program."""

from __future__ import annotations

import pytest
from toy_models import LLAMA

from octavo.models.native import reason_against
from octavo.models.registry import spec_of


@pytest.mark.parametrize(("taps", "reason"), [(8, None), (9, "the kernels lack convolutions over more than 8 tokens")])
def test_convolutions_over_many_tokens(taps: int, reason: str | None) -> None:
    kinds = ["conv", "full_attention"]
    config = {"architectures": ["Lfm2ForCausalLM"], "layer_types": kinds, "conv_L_cache": taps}
    assert reason_against(spec_of(LLAMA | config)) == reason
