"""`suffix`: what stands after the text that is to be written, where the model knows how to fill in the middle."""

from __future__ import annotations

from typing import Any

import pytest
from server_kit import ask_now, make_tokenizer, saying

from octavo.engine.fake import FakeEngine, fake_info
from octavo.server.app import create_app
from octavo.text.frontend import Frontend

TEXT = "/v1/completions"
MARKS = ["<fim_prefix>", "<fim_suffix>", "<fim_middle>"]


class Place:
    def __init__(self, *marks: str) -> None:
        self.tokenizer = make_tokenizer()
        self.tokenizer.backend.add_special_tokens(list(marks))
        info = fake_info(name="toy", vocab_size=self.tokenizer.backend.get_vocab_size())
        self.engine = FakeEngine(saying("x"), info=info)
        self.app = create_app(Frontend(self.engine, self.tokenizer, info))

    def prompts(self, body: dict[str, Any]) -> list[str]:
        assert ask_now(self.app, TEXT, body).status == 200
        decode = self.tokenizer.backend.decode
        return [decode(request.tokens, skip_special_tokens=False) for request in self.engine.requests]


def test_the_prompt_is_written_as_the_model_learnt_it() -> None:
    place = Place(*MARKS)
    asked = {"prompt": ["def f(", "é"], "suffix": "  return 1"}
    assert sorted(place.prompts(asked)) == [
        f"<fim_prefix>{text}<fim_suffix>  return 1<fim_middle>" for text in ("def f(", "é")
    ]
    first = place.engine.requests[0].tokens
    assert first[0] == place.tokenizer.backend.token_to_id("<fim_prefix>")


@pytest.mark.parametrize("suffix", [None, ""])
def test_no_suffix_is_a_plain_prompt(suffix: str | None) -> None:
    assert Place(*MARKS).prompts({"prompt": "a", "suffix": suffix}) == ["a"]


@pytest.mark.parametrize(
    ("marks", "fields", "param", "text"),
    [
        (MARKS[:2], {}, "suffix", "fill-in-the-middle tokens"),
        (MARKS, {"prompt": [5, 6]}, "suffix", "not token ids"),
        (MARKS, {"echo": True}, "echo", "can't be combined"),
        (MARKS, {"suffix": 5}, "suffix", "must be a string"),
    ],
)
def test_where_it_can_not_be_had(marks: list[str], fields: dict[str, Any], param: str, text: str) -> None:
    answer = ask_now(Place(*marks).app, TEXT, {"prompt": "a", "suffix": "b"} | fields)
    assert answer.status == 400
    assert (answer.error()["param"], text in answer.error()["message"]) == (param, True)
