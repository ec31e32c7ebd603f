"""The Responses API of the real processes, asked by the openai client."""

from __future__ import annotations

from typing import Any

import openai
import pytest

pytestmark = pytest.mark.e2e

ASKED: Any = {
    "model": "smollm2",
    "input": "What is the capital of France?",
    "temperature": 0,
    "max_output_tokens": 24,
}


def test_a_response_its_stream_and_its_successor(client: openai.OpenAI) -> None:
    first = client.responses.create(**ASKED)
    assert "Paris" in first.output_text
    with client.responses.stream(**ASKED) as stream:
        pieces = [event.delta for event in stream if event.type == "response.output_text.delta"]
        last = stream.get_final_response()
    assert "".join(pieces) == last.output_text == first.output_text
    assert client.responses.retrieve(first.id).output_text == first.output_text
    second = client.responses.create(**ASKED | {"input": "Thanks."}, previous_response_id=first.id)
    assert second.usage is not None
    assert first.usage is not None
    assert second.usage.input_tokens > first.usage.total_tokens
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)


def test_a_stream_in_the_background_is_taken_up_again(client: openai.OpenAI) -> None:
    whole = client.responses.create(**ASKED)
    events = []
    with client.responses.create(**ASKED, background=True, stream=True) as stream:
        for event in stream:
            events.append(event)
            if event.type == "response.output_text.delta":
                break
    assert events[0].type == "response.created"
    name = events[0].response.id
    events += client.responses.retrieve(name, stream=True, starting_after=events[-1].sequence_number)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    pieces = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(pieces) == whole.output_text
    assert events[-1].type == "response.completed"
    assert client.responses.retrieve(name).output_text == whole.output_text
    with client.responses.stream(response_id=name, starting_after=0) as again:
        assert again.get_final_response().output_text == whole.output_text
