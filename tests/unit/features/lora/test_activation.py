"""Where activated adapters begin, and what they may change."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.core.errors import ModelFileError
from octavo.features.lora.activation import activated_at, check_activated, invocation_of
from octavo.features.lora.layout import Manifest, Piece, Target, TargetPart

TOKENS = st.lists(st.integers(0, 2), max_size=12)


@given(TOKENS, st.lists(st.integers(0, 2), min_size=1, max_size=3))
def test_an_adapter_begins_at_the_last_occurrence(prompt: list[int], invocation: list[int]) -> None:
    places = [i for i in range(len(prompt)) if prompt[i : i + len(invocation)] == invocation]
    assert activated_at(invocation, prompt) == (places[-1] if places else None)
    assert activated_at((), prompt) == 0


@pytest.mark.parametrize("value", [[], "text", [1, -1], [1.0], [True], 5, {}])
def test_other_values_than_token_ids_are_refused(value: object) -> None:
    with pytest.raises(ModelFileError, match=r"config: alora_invocation_tokens is .* must be a list of token ids"):
        invocation_of({"alora_invocation_tokens": value}, "alora_invocation_tokens", Path("config"))


def test_only_additions_to_layers_of_the_body_can_be_activated() -> None:
    part = (TargetPart("", 8, 8, 8, 8),)
    targets = (
        Target("embed_tokens", part, embedding=True),
        Target("layers.0.up_proj", part),
        Target("lm_head", part, head=True),
    )
    allowed = Piece(1, 0, 4)
    check_activated(Path("a"), Manifest((allowed,), (3,)), targets)
    for piece in (Piece(0, 0, 4), Piece(2, 0, 4), Piece(1, 0, 4, gain=True), Piece(1, 0, whole=True)):
        check_activated(Path("a"), Manifest((allowed, piece)), targets)
        with pytest.raises(ModelFileError, match=r"a: .* which an activated adapter \(aLoRA\) can't change"):
            check_activated(Path("a"), Manifest((allowed, piece), (3,)), targets)
    with pytest.raises(ModelFileError, match="token 8 of its invocation tokens is out of vocabulary; the model has 8"):
        check_activated(Path("a"), Manifest((allowed,), (3, 8)), targets)
