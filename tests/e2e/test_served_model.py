"""The real model behind the real processes, asked by the openai client."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

import openai
import pytest
from serving import Server

pytestmark = pytest.mark.e2e

FRANCE: Any = [{"role": "user", "content": "What is the capital of France?"}]


def test_the_model_is_listed(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["smollm2"]
    assert client.models.retrieve("smollm2").model_dump()["max_model_len"] == 2048


@pytest.mark.parametrize("dtype", ["auto", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_a_question_is_answered_in_the_dtype_that_users_get(start_server: Callable[..., Server], dtype: str) -> None:
    """The other servers here compute in float32; on a CPU that is fast at it, the default is bfloat16."""
    server = start_server("--dtype", dtype)
    asked = {"model": "smollm2", "messages": FRANCE, "temperature": 0, "max_tokens": 32}
    answer = server.http.post("/v1/chat/completions", json=asked).json()
    assert "Paris" in answer["choices"][0]["message"]["content"]


def test_a_question_is_answered(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="smollm2", messages=FRANCE, temperature=0, max_tokens=16)
    assert "Paris" in (answer.choices[0].message.content or "")
    assert answer.choices[0].finish_reason in ("stop", "length")
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_a_stream_is_the_whole_in_pieces(client: openai.OpenAI) -> None:
    asked: Any = {"model": "smollm2", "messages": FRANCE, "temperature": 0, "max_tokens": 12}
    whole = client.chat.completions.create(**asked)
    chunks = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    pieces = [choice.delta.content or "" for chunk in chunks for choice in chunk.choices]
    assert len([piece for piece in pieces if piece]) > 3
    assert "".join(pieces) == whole.choices[0].message.content
    ends = [choice.finish_reason for chunk in chunks for choice in chunk.choices if choice.finish_reason]
    assert ends == [whole.choices[0].finish_reason]
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_several_prompts_and_choices(client: openai.OpenAI) -> None:
    asked: Any = {"model": "smollm2", "prompt": ["One, two,", "Red, green,"], "max_tokens": 8, "seed": 5, "logprobs": 2}
    whole = client.completions.create(**asked, n=2)
    assert [choice.index for choice in whole.choices] == [0, 1, 2, 3]
    joined = dict.fromkeys(range(4), "")
    for chunk in client.completions.create(**asked, n=2, stream=True):
        for choice in chunk.choices:
            joined[choice.index] += choice.text
    assert list(joined.values()) == [choice.text for choice in whole.choices]
    for choice in whole.choices:
        assert choice.logprobs is not None
        assert choice.logprobs.token_logprobs is not None
        assert len(choice.logprobs.token_logprobs) == 8
        assert all(value is not None and value <= 0 for value in choice.logprobs.token_logprobs)


def test_a_stop_string_ends_the_text(client: openai.OpenAI) -> None:
    asked: Any = {"model": "smollm2", "prompt": "1 2 3 4 5 6", "temperature": 0, "max_tokens": 14}
    free = client.completions.create(**asked).choices[0].text
    stop = free[5:8]
    cut = client.completions.create(**asked, stop=stop).choices[0]
    assert cut.text == free[: free.index(stop)]
    assert cut.finish_reason == "stop"
    assert cut.model_dump()["stop_reason"] == stop


def test_a_shared_prefix_is_computed_once(server: Server, client: openai.OpenAI) -> None:
    prompt = "The shared beginning of many requests, word by word. " * 20
    asked: Any = {"model": "smollm2", "max_tokens": 1, "extra_body": {"cache_salt": "prefix-test"}}
    first = client.completions.create(prompt=prompt + "First.", **asked)
    hits = server.metric("octavo:prefix_cache_hits_total")
    second = client.completions.create(prompt=prompt + "Second.", **asked)
    assert first.usage is not None
    assert second.usage is not None
    assert second.usage.prompt_tokens_details is not None
    cached = second.usage.prompt_tokens_details.cached_tokens
    assert cached is not None
    assert second.usage.prompt_tokens - 32 < cached < second.usage.prompt_tokens
    assert server.metric("octavo:prefix_cache_hits_total") - hits == cached


def test_metrics_agree_with_the_answers(server: Server, client: openai.OpenAI) -> None:
    names = ("generation_tokens_total", "prompt_tokens_total", "request_generation_tokens_sum")
    before = {name: server.metric(f"octavo:{name}") for name in names}
    usage = client.completions.create(
        model="smollm2", prompt="Once upon a time", max_tokens=9, extra_body={"ignore_eos": True}
    ).usage
    assert usage is not None
    server.wait_idle()
    gained = {name: server.metric(f"vllm:{name}") - before[name] for name in names}
    assert gained == {
        "generation_tokens_total": 9,
        "prompt_tokens_total": usage.prompt_tokens,
        "request_generation_tokens_sum": 9,
    }
    assert server.metric("octavo:kv_blocks") > 0
    assert 0 <= server.metric("octavo:kv_waste_mean") < 1


def test_streams_that_break_off_leave_nothing_behind(server: Server) -> None:
    async def one(client: openai.AsyncOpenAI, number: int) -> tuple[bool, str]:
        draw = random.Random(number)
        patience = draw.choice([0, 1, 3, 10, None])
        stream = await client.chat.completions.create(
            model="smollm2",
            messages=[{"role": "user", "content": f"Tell story number {number}. " * draw.randint(1, 4)}],
            max_tokens=draw.randint(4, 16),
            n=draw.choice([1, 1, 1, 2]),
            temperature=0.8,
            seed=number,
            stream=True,
        )
        pieces: list[str] = []
        async with stream:
            count = 0
            async for chunk in stream:
                if patience is not None and count >= patience:
                    return False, ""
                pieces += [choice.delta.content or "" for choice in chunk.choices if choice.index == 0]
                count += 1
        return True, "".join(pieces)

    async def crowd() -> list[tuple[bool, str]]:
        async with openai.AsyncOpenAI(
            base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=240
        ) as client:
            return await asyncio.gather(*(one(client, number) for number in range(32)))

    results = asyncio.run(crowd())
    finished = [text for done, text in results if done]
    assert 3 < len(finished) < 30
    assert all(finished)
    server.wait_idle()
    assert server.http.get("/health").status_code == 200
    aborted = server.metric("octavo:request_success_total", finished_reason="abort")
    assert aborted > 0
