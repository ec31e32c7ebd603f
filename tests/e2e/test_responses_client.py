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
