"""Conversations that take turns at real servers, in two ranks of processes of their own, and after a restart, with
OpenAI's client."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from serving import Server, together, wait_until
from toy_models import save_decoder

from octavo.features.host_cache.files import _HEADER_BYTES, _RECORD

pytestmark = pytest.mark.e2e

TALKS = 6
SETTINGS = (
    *("--dtype", "float32", "--threads", "1", "--max-model-len", "128"),
    *("--kv-offloading-size", "0.01", "--server-dev-mode"),
)


def served(tmp_path: Path, *settings: str) -> Server:
    model = tmp_path / "model"
    if not model.exists():
        save_decoder(model, seed=3, vocab_size=512)
    return Server(str(model), tmp_path / "log", *SETTINGS, *settings)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    server = served(tmp_path, "--tensor-parallel-size", "2", "--kv-cache-memory-bytes", "150000")
    try:
        server.wait_ready()
        yield server
        assert server.stop() == 0, server.output()
        assert "Traceback" not in server.output(), server.output()
    finally:
        server.close()


def client_of(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def tokens_of(client: openai.OpenAI, talk: list[int]) -> list[int]:
    extra = {"ignore_eos": True, "return_token_ids": True}
    found: Any = client.completions.create(model="smollm2", prompt=talk, max_tokens=8, temperature=0, extra_body=extra)
    return list(found.choices[0].token_ids)


def test_evicted_conversations_go_on(server: Server) -> None:
    rng = random.Random(1)
    talks = [[rng.randrange(4, 500) for _ in range(80)] for _ in range(TALKS)]
    with client_of(server) as client:
        tokens = partial(tokens_of, client)
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


def named_in(folder: Path) -> int:
    """Return how many blocks are in files."""
    data = (folder / "rank0of1-0.names").read_bytes()[_HEADER_BYTES:]
    return sum(length > 0 for length, *_ in _RECORD.iter_unpack(data))


@pytest.mark.parametrize("how", [pytest.param("stopped", marks=pytest.mark.slow), "killed"])
def test_conversations_go_on_after_a_restart(how: str, tmp_path: Path) -> None:
    """Also when the server had no time to end."""
    rng = random.Random(2)
    talks = [[rng.randrange(4, 500) for _ in range(80)] for _ in range(2)]
    settings = ("--kv-offloading-path", str(tmp_path / "kv"), "--kv-cache-memory-bytes", "1000000")
    server = served(tmp_path, *settings)
    try:
        server.wait_ready()
        with client_of(server) as client:
            first = [tokens_of(client, talk) for talk in talks]
        wait_until(lambda: named_in(tmp_path / "kv") >= 2 * 5, "blocks are kept")
        if how == "stopped":
            assert server.stop() == 0, server.output()
        else:
            for process in (*server.children(), server.process.pid):
                os.kill(process, signal.SIGKILL)
    finally:
        server.close()
    later = served(tmp_path, *settings)
    try:
        later.wait_ready()
        with client_of(later) as client:
            assert [tokens_of(client, talk) for talk in talks] == first
        assert later.metric("octavo:kv_blocks_loaded_total") >= 2 * 4
        assert later.stop() == 0, later.output()
        assert "Traceback" not in later.output(), later.output()
    finally:
        later.close()
