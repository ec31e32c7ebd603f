"""What is not a prompt is told in a sentence, before anything is computed."""

from __future__ import annotations

from typing import Any

import pytest

from octavo.python.inputs import as_list


@pytest.mark.parametrize("odd", [5, 5.0, None, object(), (text for text in ("a", "b"))])
def test_what_can_not_be_a_prompt(odd: Any) -> None:
    with pytest.raises(TypeError, match=f"prompts must be a text, token ids, .* got {type(odd).__name__}"):
        as_list(odd)


@pytest.mark.parametrize(
    ("given", "prompts"),
    [
        ("a", ["a"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1, 2], "b"], [[1, 2], "b"]),
        ({"prompt": "a"}, [{"prompt": "a"}]),
        ([], []),
    ],
)
def test_one_prompt_or_several(given: Any, prompts: list[Any]) -> None:
    assert as_list(given) == prompts
