"""Anthropic's own client against the real model behind the real processes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import pytest
from serving import Server

pytestmark = pytest.mark.e2e

ASKED: Any = {
    "model": "smollm2",
    "max_tokens": 24,
    "extra_body": {"temperature": 0},
    "system": "You answer in one sentence.",
    "messages": [{"role": "user", "content": "What is the capital of France?"}],
}


@pytest.fixture
def client(server: Server) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        yield client


def test_a_message_and_its_stream(client: anthropic.Anthropic) -> None:
    whole = client.messages.create(**ASKED)
    (block,) = whole.content
    assert block.type == "text"
    assert "Paris" in block.text
    with client.messages.stream(**ASKED) as stream:
        assert "".join(stream.text_stream) == block.text
        last = stream.get_final_message()
    assert last.stop_reason == whole.stop_reason
    assert last.usage.output_tokens == whole.usage.output_tokens


def test_tokens_are_counted_as_they_are_used(client: anthropic.Anthropic) -> None:
    counted = client.messages.count_tokens(**{name: ASKED[name] for name in ("model", "system", "messages")})
    usage = client.messages.create(**ASKED).usage
    assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)


def test_errors_are_the_clients_own(client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.BadRequestError, match="temperature"):
        client.messages.create(**ASKED | {"extra_body": {"temperature": 9}})
    with pytest.raises(anthropic.NotFoundError, match="nobody"):
        client.messages.create(**ASKED | {"model": "nobody"})
