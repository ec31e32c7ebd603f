"""A server that decodes and another one that computes its prompts, as processes, with OpenAI's client."""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from serving import WAIT_S, Server, free_port, together, wait_until
from toy_models import save_decoder

pytestmark = pytest.mark.e2e

SETTINGS = "--dtype", "float32", "--threads", "1", "--max-model-len", "128", "--kv-cache-memory-bytes", "2000000"
PRODUCER = "--kv-transfer-config.kv_role", "kv_producer"
Serve = Callable[..., Server]


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    """Starts servers of one model; all must end without an error, unless the test has killed them."""
    save_decoder(tmp_path / "model", seed=3, vocab_size=512)
    servers: list[Server] = []

    def start(*settings: str) -> Server:
        log = tmp_path / f"log{len(servers)}"
        servers.append(Server(str(tmp_path / "model"), log, *SETTINGS, *settings))
        return servers[-1]

    try:
        yield start
        for server in servers:
            if server.process.poll() is None:
                assert server.stop() == 0, server.output()
            assert "Traceback" not in server.output(), server.output()
    finally:
        for server in servers:
            server.close()


def prompts(count: int) -> list[list[int]]:
    rng = random.Random(count)
    return [[rng.randrange(4, 500) for _ in range(rng.randrange(64, 110))] for _ in range(count)]


def complete(server: Server, prompt: list[int], **body: Any) -> Any:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="key", max_retries=0, timeout=WAIT_S)
    extra = {"ignore_eos": True, "return_token_ids": True, **body.pop("extra_body", {})}
    settings = {"max_tokens": 12, "temperature": 0, "model": "smollm2", **body}
    return client.completions.create(prompt=prompt, extra_body=extra, **settings)


def tokens(server: Server, prompt: list[int], **body: Any) -> list[int]:
    return list(complete(server, prompt, **body).choices[0].token_ids)


def streamed(server: Server, prompt: list[int]) -> list[int]:
    return [one for event in complete(server, prompt, stream=True) for one in event.choices[0].token_ids or []]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Server]]:
    """A prefill server, which wants a key, and a server that asks it."""
    folder = tmp_path_factory.mktemp("pair")
    save_decoder(folder / "model", seed=3, vocab_size=512)
    model = str(folder / "model")
    prefill = Server(model, folder / "prefill", *SETTINGS, *PRODUCER, "--api-key", "key")
    prefill.http.headers["Authorization"] = "Bearer key"
    keys = "--kv-transfer-config.kv_role", "kv_consumer", "--kv-transfer-config.min_tokens", "32"
    ask = "--prefill-servers", prefill.url, "--prefill-api-key", "key"
    decode = Server(model, folder / "decode", *SETTINGS, *ask, *keys)
    try:
        prefill.wait_ready()
        decode.wait_ready()
        yield prefill, decode
        for server in (decode, prefill):
            assert server.stop() == 0, server.output()
            assert "Traceback" not in server.output(), server.output()
    finally:
        decode.close()
        prefill.close()


def test_prompts_are_computed_by_the_prefill_server(pair: tuple[Server, Server]) -> None:
    """The decoding server computes only the rests of last blocks, and short prompts."""
    prefill, decode = pair
    asked = prompts(6)
    expected = [tokens(prefill, prompt) for prompt in asked]
    before = decode.metric("octavo:kv_blocks_loaded_total")
    assert together(lambda prompt: streamed(decode, prompt), asked) == expected
    assert decode.metric("octavo:prefills_asked_total") == 6
    assert decode.metric("octavo:prefills_failed_total") == 0
    assert decode.metric("octavo:kv_blocks_loaded_total") - before == sum((len(one) - 1) // 16 for one in asked)
    assert tokens(decode, asked[0]) == expected[0]
    tokens(decode, asked[0][:30])
    assert decode.metric("octavo:prefills_asked_total") == 6, "cached or short"
    assert f"fetches them from {prefill.url}" in decode.output()
    assert "sends them to servers that ask for them" in prefill.output()


def test_a_router_passes_on_what_is_offered(pair: tuple[Server, Server]) -> None:
    """As vLLM's routers do: one token by the first server, whose parameters are passed to the second."""
    first, second = pair
    asking = {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "remote_engine_id": None,
        "remote_block_ids": None,
        "remote_host": None,
        "remote_port": None,
    }
    before = second.metric("octavo:kv_blocks_loaded_total")
    for prompt in prompts(3):
        expected = tokens(first, prompt)
        answer = complete(first, prompt, max_tokens=1, extra_body={"kv_transfer_params": asking})
        offered = answer.model_extra["kv_transfer_params"]
        assert tokens(second, prompt, extra_body={"kv_transfer_params": offered}) == expected
    assert second.metric("octavo:kv_blocks_loaded_total") - before == sum((len(one) - 1) // 16 for one in prompts(3))


def test_it_is_said_what_a_request_waits_for(pair: tuple[Server, Server]) -> None:
    """While the prefill server stands still; what comes later and is short passes it."""
    prefill, decode = pair
    before = decode.metric("octavo:kv_blocks_loaded_total")
    family = [prefill.process.pid, *prefill.children()]
    for process in family:
        os.kill(process, signal.SIGSTOP)
    try:
        with ThreadPoolExecutor(1) as threads:
            answer = threads.submit(tokens, decode, [5] * 100)
            text = f"its prompt, which {prefill.url} computes"
            wait_until(lambda: text in decode.http.get("/debug/requests").text, "the request waits")
            tokens(decode, [6] * 20)
            assert not answer.done()
            for process in family:
                os.kill(process, signal.SIGCONT)
            assert len(answer.result(WAIT_S)) == 12
    finally:
        for process in family:
            os.kill(process, signal.SIGCONT)
    assert decode.metric("octavo:kv_blocks_loaded_total") - before == 6


@pytest.mark.parametrize(
    "how",
    [
        pytest.param("killed", id="killed"),
        pytest.param("stopped", marks=pytest.mark.slow, id="stands still"),
        pytest.param("absent", marks=pytest.mark.slow, id="never there"),
    ],
)
def test_without_its_prefill_server_a_server_answers_alone(how: str, serve: Serve) -> None:
    prefill = serve(*PRODUCER)
    keys = {"kv_role": "kv_consumer", "min_tokens": 32, "timeout": 3}
    flags = [text for name, value in keys.items() for text in (f"--kv-transfer-config.{name}", str(value))]
    decode = serve("--prefill-servers", prefill.url, *flags)
    prefill.wait_ready()
    decode.wait_ready()
    first, second, third = prompts(3)
    expected = [tokens(prefill, prompt) for prompt in (second, third)]
    family = [prefill.process.pid, *prefill.children()]
    if how == "absent":
        prefill.stop()
    else:
        tokens(decode, first)
        assert decode.metric("octavo:kv_blocks_loaded_total") > 0
        for process in reversed(family):
            os.kill(process, signal.SIGKILL if how == "killed" else signal.SIGSTOP)
    try:
        assert [tokens(decode, prompt) for prompt in (second, third)] == expected
        assert decode.metric("octavo:prefills_failed_total") == 2
        assert "so it is computed here" in decode.output()
        assert decode.http.get("/health").status_code == 200
    finally:
        if how == "stopped":
            for process in family:
                os.kill(process, signal.SIGCONT)


@pytest.mark.slow
def test_a_client_that_leaves_ends_the_prompt_at_both_servers(serve: Serve) -> None:
    prefill = serve(*PRODUCER, "--max-num-batched-tokens", "16")
    keys = "--kv-transfer-config.kv_role", "kv_consumer", "--kv-transfer-config.min_tokens", "32"
    decode = serve("--prefill-servers", prefill.url, *keys)
    prefill.wait_ready()
    decode.wait_ready()
    long = [7] * 110
    with httpx.Client(timeout=0.001) as client:
        for _ in range(5):
            with pytest.raises(httpx.TimeoutException):
                client.post(f"{decode.url}/v1/completions", json={"model": "smollm2", "prompt": long, "max_tokens": 4})
    decode.wait_idle()
    prefill.wait_idle()


@pytest.mark.slow
def test_a_prefill_server_that_comes_and_goes(serve: Serve) -> None:
    """Under load it is killed and started again at its port, three times. Every answer is that of one server alone."""
    keys = "--kv-transfer-config.kv_role", "kv_consumer", "--kv-transfer-config.min_tokens", "32"
    port = str(free_port())
    decode = serve("--prefill-servers", f"http://127.0.0.1:{port}", *keys, "--kv-transfer-config.timeout", "5")
    decode.wait_ready()
    local = {"kv_transfer_params": {"do_remote_prefill": False, "do_remote_decode": False}}
    common = prompts(1)[0][:40]
    asked = [common[: 8 * (i % 5)] + prompt[:64] for i, prompt in enumerate(prompts(24))]
    expected = [tokens(decode, prompt, extra_body=local) for prompt in asked]
    rng, stop, loaded = random.Random(4), threading.Event(), "octavo:kv_blocks_loaded_total"

    def client(_: int) -> list[int]:
        wrong = []
        while not stop.is_set():
            i = rng.randrange(len(asked))
            if tokens(decode, asked[i], extra_body={"cache_salt": str(rng.random())}) != expected[i]:
                wrong.append(i)
        return wrong

    with ThreadPoolExecutor(6) as threads:
        answers = [threads.submit(client, number) for number in range(6)]
        try:
            for _ in range(3):
                enough = decode.metric(loaded) + 100
                prefill = serve(*PRODUCER, "--port", port)
                wait_until(lambda least=enough: decode.metric(loaded) > least, "blocks are fetched")
                for process in (*reversed(prefill.children()), prefill.process.pid):
                    os.kill(process, signal.SIGKILL)
                prefill.process.wait()
        finally:
            stop.set()
        assert [answer.result(WAIT_S) for answer in answers] == [[]] * 6
    assert decode.metric("octavo:prefills_failed_total") > 0
    decode.wait_idle()
