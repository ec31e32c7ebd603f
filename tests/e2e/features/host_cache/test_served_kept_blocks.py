"""Conversations that take turns at a real server, in two ranks of processes of their own, with OpenAI's client."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from serving import Server, together
from toy_models import save_decoder

pytestmark = pytest.mark.e2e

TALKS = 6
SETTINGS = (
    *("--dtype", "float32", "--threads", "1", "--max-model-len", "128", "--kv-cache-memory-bytes", "150000"),
    *("--tensor-parallel-size", "2", "--kv-offloading-size", "0.01", "--server-dev-mode"),
)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    model = save_decoder(tmp_path / "model", seed=3, vocab_size=512)
    server = Server(str(model), tmp_path / "log", *SETTINGS)
    try:
        server.wait_ready()
        yield server
        assert server.stop() == 0, server.output()
        assert "Traceback" not in server.output(), server.output()
    finally:
        server.close()


def test_evicted_conversations_go_on(server: Server) -> None:
    rng = random.Random(1)
    talks = [[rng.randrange(4, 500) for _ in range(80)] for _ in range(TALKS)]
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:

        def tokens(talk: list[int]) -> list[int]:
            extra = {"ignore_eos": True, "return_token_ids": True}
            found: Any = client.completions.create(
                model="smollm2", prompt=talk, max_tokens=8, temperature=0, extra_body=extra
            )
            return list(found.choices[0].token_ids)

        first = [tokens(talk) for talk in talks]
        assert server.metric("octavo:kv_blocks_evicted_total") > 0
        assert together(tokens, talks) == first
        assert server.metric("octavo:kv_blocks_loaded_total") > 0
        assert server.metric("octavo:host_kv_blocks") >= TALKS * 5
        assert httpx.post(f"{server.url}/reset_prefix_cache").is_success
        assert server.metric("octavo:host_kv_blocks") == 0
        loaded = server.metric("octavo:kv_blocks_loaded_total")
        assert tokens(talks[0]) == first[0]
        assert server.metric("octavo:kv_blocks_loaded_total") == loaded
