"""Two replicas of a real model answer as one engine does, and go on when one of them is killed."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import toy_models

from octavo import AsyncLLM, SamplingParams
from octavo.engine.replicas import ReplicaClient

pytestmark = pytest.mark.slow

SETTINGS: dict[str, Any] = {"kv_cache_memory_bytes": 1 << 22, "threads": 1, "device": "cpu", "dtype": "float32"}


async def answers(llm: AsyncLLM, names: str) -> list[list[int]]:
    async def one(number: int, name: str) -> list[int]:
        prompt = {"prompt_token_ids": [5 + number] * 9}
        params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
        found = [output async for output in llm.generate(prompt, params, request_id=name)]  # type: ignore[arg-type]
        return list(found[-1].outputs[0].token_ids)

    return await asyncio.gather(*(one(number, name) for number, name in enumerate(names)))


def test_two_replicas_answer_as_one_engine_does(tmp_path: Path) -> None:
    model = str(toy_models.save_decoder(tmp_path, seed=1))

    async def run() -> None:
        async with await AsyncLLM.start(model, **SETTINGS) as llm:
            expected = await answers(llm, "abcd")
        async with await AsyncLLM.start(model, data_parallel_size=2, **SETTINGS) as llm:
            assert await answers(llm, "abcd") == expected
            client = llm._client
            assert isinstance(client, ReplicaClient)
            assert all(one.stats().num_steps for one in client.replicas)
            before = client._clients[1]
            os.kill(before.process.pid, signal.SIGKILL)
            async with asyncio.timeout(60):
                while before.dead is None:
                    await asyncio.sleep(0.01)
            assert await answers(llm, "efgh") == expected
            async with asyncio.timeout(120):
                while client._clients[1] is before:
                    await asyncio.sleep(0.01)
            assert await answers(llm, "ijkl") == expected
            assert all(one.stats().num_steps for one in client.replicas)

    asyncio.run(run())
