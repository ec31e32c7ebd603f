"""Servers for the end-to-end tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import openai
import pytest
from serving import Server

from octavo.hub.files import ModelFiles

# In float32 the greedy tokens do not hang on how the requests were batched; one thread leaves the rest to the client.
SETTINGS = (
    *("--kv-cache-memory-bytes", "256M", "--max-model-len", "2048", "--threads", "1", "--dtype", "float32"),
    "--enable-prompt-tokens-details",
)


@pytest.fixture(scope="session")
def server(smollm2_files: ModelFiles, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The server that most tests share. It must have freed everything by the end, and stop in good order."""
    server = Server(str(smollm2_files.path), tmp_path_factory.mktemp("server") / "log", *SETTINGS)
    try:
        server.wait_ready()
        yield server
        server.wait_idle()
        assert server.stop() == 0, server.output()
        assert "Traceback" not in server.output(), server.output()
    finally:
        server.close()


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    """OpenAI's client of that server."""
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def start_server(smollm2_files: ModelFiles, tmp_path: Path) -> Iterator[Callable[..., Server]]:
    """Starts servers of a test's own."""
    started: list[Server] = []

    def start(*arguments: str) -> Server:
        server = Server(str(smollm2_files.path), tmp_path / f"log-{len(started)}", *SETTINGS, *arguments)
        started.append(server)
        server.wait_ready()
        return server

    try:
        yield start
    finally:
        for server in started:
            server.close()
