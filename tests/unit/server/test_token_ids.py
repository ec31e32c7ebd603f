"""Token ids in, token ids out: nobody asks the tokenizer anything."""

from __future__ import annotations

from typing import Any

import pytest
from server_kit import TOKENIZER, VOCAB_SIZE, ask_now, saying

from octavo.engine.fake import FakeEngine, fake_info
from octavo.server.app import create_app
from octavo.text.frontend import Frontend
from octavo.text.tokenizers.tokenizer import Tokenizer

PATH = "/v1/completions"
SAID = TOKENIZER.encode("Bonjour", add_special_tokens=False)
IDS = {"prompt": [5, 6, 7], "max_tokens": 7, "detokenize": False}


class Untouched(Tokenizer):
    """Says what it is, and fails when it is put to work."""

    def _refuse(self, *args: Any, **options: Any) -> Any:
        raise AssertionError("the tokenizer was asked")

    encode = encode_within = decode = token_bytes = token_text = leading_spaces = _refuse


def app_with(kind: type[Tokenizer] = Tokenizer) -> Any:
    engine = FakeEngine(saying("Bonjour"), info=fake_info(name="toy", vocab_size=VOCAB_SIZE))
    return create_app(Frontend(engine, kind(TOKENIZER.backend), engine.info))


SEVERAL = {"n": 2, "prompt": [[5, 6, 7], [8]]}


@pytest.mark.parametrize("more", [{}, {"logprobs": 2}, SEVERAL, {"logprobs": 1, "best_of": 2}])
def test_whole(more: dict[str, Any]) -> None:
    answer = ask_now(app_with(Untouched), PATH, IDS | more)
    assert answer.status == 200, answer.body
    for choice in answer.json()["choices"]:
        assert (choice["text"], choice["token_ids"]) == ("", SAID)
        assert choice["prompt_token_ids"]
        if choice["logprobs"]:
            assert choice["logprobs"]["tokens"] == [f"token_id:{token}" for token in SAID]


@pytest.mark.parametrize("more", [{}, {"logprobs": 2}, {"n": 2}])
def test_streamed(more: dict[str, Any]) -> None:
    events = ask_now(app_with(Untouched), PATH, IDS | more | {"stream": True}).events()
    for index in range(more.get("n", 1)):
        parts = [choice for event in events for choice in event["choices"] if choice["index"] == index]
        assert [token for part in parts for token in part["token_ids"]] == SAID
        assert {part["text"] for part in parts} == {""}
        assert parts[-1]["finish_reason"] == "length"


def test_the_same_tokens_as_with_text() -> None:
    said = ask_now(app_with(), PATH, IDS | {"detokenize": True, "return_token_ids": True}).json()["choices"][0]
    assert (said["text"], said["token_ids"]) == ("Bonjour", SAID)
    said = ask_now(app_with(), PATH, IDS | {"prompt": "Hi"}).json()["choices"][0]
    assert (said["text"], said["token_ids"]) == ("", SAID)


@pytest.mark.parametrize(("more", "message"), [({"stop": ["x"]}, "detokenize"), ({"echo": True}, "echo is text")])
def test_what_needs_text_is_refused(more: dict[str, Any], message: str) -> None:
    assert message in ask_now(app_with(Untouched), PATH, IDS | more).error()["message"]
