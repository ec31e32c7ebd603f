"""Ollama's own client."""

from __future__ import annotations

from typing import Any

import ollama
import pytest
from conftest import MODEL
from pydantic import BaseModel

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
GREEDY = {"temperature": 0, "num_predict": 24}


class City(BaseModel):
    name: str
    rank: int


@pytest.fixture
def client(url: str) -> ollama.Client:
    return ollama.Client(host=url)


@pytest.fixture
def aclient(url: str) -> ollama.AsyncClient:
    return ollama.AsyncClient(host=url)


def test_models(client: ollama.Client) -> None:
    (model,) = client.list().models
    assert model.model == MODEL
    assert client.ps().models[0].model == MODEL
    shown = client.show(MODEL)
    assert "completion" in (shown.capabilities or [])
    family = (shown.modelinfo or {})["general.architecture"]
    assert (shown.modelinfo or {})[f"{family}.context_length"] > 1024
    assert client.pull(MODEL).status == "success"
    with pytest.raises(ollama.ResponseError, match="octavo serve") as missing:
        client.pull("nobody")
    assert missing.value.status_code == 404


def test_chat(client: ollama.Client) -> None:
    whole = client.chat(MODEL, QUESTION, options=GREEDY)
    assert "Paris" in (whole.message.content or "")
    assert (whole.done, whole.done_reason) == (True, "stop")
    assert whole.eval_count
    parts = list(client.chat(MODEL, QUESTION, options=GREEDY, stream=True))
    assert "".join(part.message.content or "" for part in parts) == whole.message.content
    assert parts[-1].eval_count == whole.eval_count


async def test_async_chat(aclient: ollama.AsyncClient) -> None:
    text = ""
    async for part in await aclient.chat(MODEL, QUESTION, options=GREEDY, stream=True):
        text += part.message.content or ""
    assert "Paris" in text


def test_schema(client: ollama.Client) -> None:
    answer = client.chat(
        MODEL,
        [{"role": "user", "content": "Name a city."}],
        format=City.model_json_schema(),
        options={"temperature": 0, "num_predict": 100},
    )
    assert City.model_validate_json(answer.message.content or "").name


def test_tools(client: ollama.Client) -> None:
    def get_weather(city: str) -> str:
        """Tell the weather.

        Args:
            city: the city.
        """
        return f"rain in {city}"

    asked: list[Any] = [{"role": "user", "content": "What is the weather in Paris? Call get_weather."}]
    answer = client.chat(MODEL, asked, tools=[get_weather], options=GREEDY)
    told = [
        *asked,
        {"role": "assistant", "tool_calls": [{"function": {"name": "get_weather", "arguments": {"city": "Paris"}}}]},
    ]
    told.append({"role": "tool", "tool_name": "get_weather", "content": get_weather("Paris")})
    assert answer.done
    assert client.chat(MODEL, told, tools=[get_weather], options=GREEDY).message.content


def test_generate(client: ollama.Client) -> None:
    answered = client.generate(MODEL, "What is the capital of France?", options=GREEDY)
    assert "Paris" in (answered.response or "")
    raw = client.generate(MODEL, "The capital of France is", raw=True, options=GREEDY, logprobs=True, top_logprobs=2)
    assert "Paris" in (raw.response or "")
    assert raw.logprobs
    assert len(raw.logprobs[0].top_logprobs or []) == 2
    assert client.generate(MODEL).done_reason == "load"


def test_errors(client: ollama.Client) -> None:
    with pytest.raises(ollama.ResponseError, match="nobody") as missing:
        client.chat("nobody", QUESTION)
    assert missing.value.status_code == 404
    with pytest.raises(ollama.ResponseError, match="temperature"):
        client.chat(MODEL, QUESTION, options={"temperature": 9})
    with pytest.raises(ollama.ResponseError, match="does not support thinking"):
        list(client.chat(MODEL, QUESTION, think=True, stream=True))
