"""Errors about a chat name the fields of the request that became it."""

from __future__ import annotations

from typing import Any

import pytest

from octavo.core.errors import InvalidRequestError, UnsupportedError
from octavo.server.anthropic.protocol import CountBody, own_names
from octavo.server.openai.respond.items import messages_of
from octavo.server.openai.respond.protocol import ResponseBody, in_own_names
from octavo.server.origins import Origins, in_names


def renamed(names: dict[str, str], message: str, param: str) -> tuple[str, str | None]:
    with pytest.raises(UnsupportedError) as caught, in_names(lambda: names):
        raise UnsupportedError(message, param=param, value=3)
    assert caught.value.value == 3
    return caught.value.message, caught.value.param


NAMES = {
    "messages.1": "input.4",
    "messages.2": "messages.1",
    "messages.1.content.1": "input.5.content.0",
    "messages.1.content.1.image_url.url": "input.5.content.0.image_url",
}


@pytest.mark.parametrize(
    ("chat", "own"),
    [
        ("messages.1.content.1.image_url.url", "input.5.content.0.image_url"),
        ("messages.1.content.1.type", "input.5.content.0.type"),
        ("messages.1.content.12.type", "input.4.content.12.type"),
        ("messages.12.content.1", "messages.12.content.1"),
        ("messages.2.content", "messages.1.content"),
        ("messages[1].content[1] is of", "input[5].content[0] is of"),
        ("my.messages.1", "my.messages.1"),
        ("temperature", "temperature"),
    ],
)
def test_the_longest_field_holds(chat: str, own: str) -> None:
    assert renamed(NAMES, f"{chat} is wrong, not {chat}.", chat) == (f"{own} is wrong, not {own}.", own)


def test_errors_without_names_are_left_alone() -> None:
    assert renamed({}, "messages.1 is wrong.", "messages.1") == ("messages.1 is wrong.", "messages.1")


def test_other_errors_pass() -> None:
    with pytest.raises(KeyError), in_names(lambda: pytest.fail("not needed")):
        raise KeyError("a")
    with in_names(lambda: pytest.fail("not needed")):
        pass


ITEMS: list[dict[str, Any]] = [
    {"role": "user", "content": "hello"},
    {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm"}]},
    {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"},
    {"type": "function_call", "call_id": "b", "name": "f", "arguments": "{"},
    {"type": "function_call_output", "call_id": "a", "output": [{"type": "input_text", "text": "1"}]},
    {"role": "user", "content": [{"type": "input_text", "text": "2"}, {"type": "input_text", "text": "3"}]},
]


def test_items_become_messages() -> None:
    origins = Origins()
    found = origins.names(messages_of(ITEMS, 0, origins))
    assert found["messages.1.tool_calls.1.function.arguments"] == "input.3.arguments"
    assert found["messages.2.content.0"] == "input.4.output.0"
    assert found["messages.3.content.1"] == "input.5.content.1"
    after = Origins()
    assert after.names(messages_of(ITEMS, 3, after))["messages.3.content.1"] == "input.2.content.1"
    with pytest.raises(InvalidRequestError, match=r"input\.1 must be a message") as caught:
        messages_of([*ITEMS, {"role": "user", "content": "x"}, {"role": 3, "content": "x"}], 6)
    assert caught.value.param == "input.1"


def test_an_error_about_a_call_of_the_responses_api() -> None:
    body = ResponseBody.model_validate({"input": ITEMS, "instructions": "short"})
    with pytest.raises(InvalidRequestError) as caught, in_own_names(body, []):
        raise InvalidRequestError(
            "messages[2].tool_calls[1].function.arguments is not valid JSON.", param="messages", value="{"
        )
    assert caught.value.message == "input[3].arguments is not valid JSON."
    assert caught.value.param == "input"


def test_blocks_become_parts() -> None:
    image = {"type": "image", "source": {"type": "url", "url": "http://x/y"}}
    turns = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, image]},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": [image]}, image]},
    ]
    found = own_names(CountBody.model_validate({"system": "s", "messages": turns}))
    assert found["messages.0"] == "system"
    assert found["messages.1.content.1.image_url.url"] == "messages.0.content.1.source.url"
    assert found["messages.2.tool_calls.0.function.name"] == "messages.1.content.0.name"
    assert found["messages.3.content.0.image_url"] == "messages.2.content.0.content.0.source"
    assert found["messages.4.content.0"] == "messages.2.content.1"
