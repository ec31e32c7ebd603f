"""`octavo why` against real servers whose requests wait, are preempted, and miss the prefix cache for each reason."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from serving import WAIT_S, Server, together

from octavo.features.timeline.story import REASONS

pytestmark = pytest.mark.e2e

SMALL = ("--kv-cache-memory-bytes", "24M", "--max-model-len", "400", "--spec-method", "none")
"""34 blocks of 16 tokens."""
LENGTHS = [(230, 60), (230, 60), (300, 2)]


def complete(server: Server, prompt: list[int], max_tokens: int = 1, **fields: Any) -> dict[str, Any]:
    body = {"model": "smollm2", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    answer = server.http.post("/v1/completions", json=body | {"return_cache_misses": True} | fields)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def why(server: Server, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "octavo", "why", *arguments, "--url", server.url],
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def told(server: Server, answer: dict[str, Any]) -> str:
    return "\n".join(server.http.get(f"/debug/requests/{answer['id']}").json()["text"])


def reasons(answer: dict[str, Any]) -> list[tuple[str, int, int]]:
    return [(one["reason"], one["tokens"], one["position"]) for one in answer["cache_misses"]]


def test_a_server_explains_its_requests(start_server: Callable[..., Server]) -> None:
    server = start_server(*SMALL)
    prompt = [1000 + i for i in range(100)]
    first = complete(server, prompt)
    assert reasons(first) == [("new", 100, 0)]

    # Another end, with the position of the first token that differs.
    other = complete(server, [*prompt[:70], *range(5000, 5030)])
    assert reasons(other) == [("diverged", 36, 70)]
    assert other["cache_misses"][0]["text_offset"] > 0
    text = why(server, other["id"])
    assert "64 of 100 prompt tokens from the prefix cache" in text
    assert "not cached: 36 tokens, at token 70: the closest cached prompt goes on differently" in text
    assert re.search(r"ended in the engine: length, 1 token\n", text)
    assert re.search(r"ended in the server \(length\), 1 tokens, [\d.]+ ms after the engine\n", text)

    # Of another tenant, the operator sees the reason; the client does not.
    salted = complete(server, prompt, cache_salt="tenant")
    assert reasons(salted) == [("new", 96, 0), ("last_block", 4, 96)]
    assert "not cached: 96 tokens, at token 0: it is cached for another cache_salt" in told(server, salted)

    # Prompts of 15, 15 and 19 blocks; two of them grow by 3 more. There are 34 blocks.
    asked = [([20_000 + 300 * n + i for i in range(length)], most) for n, (length, most) in enumerate(LENGTHS)]
    answers = together(lambda one: complete(server, one[0], one[1]), asked)
    texts = [told(server, answer) for answer in answers]
    assert any(re.search(r"admitted after [\d.]+ m?s \(.*[\d.]+ m?s for KV blocks", text) for text in texts), texts
    preempted = [text for text in texts if "preempted" in text]
    assert len(preempted) == 1, texts
    assert re.search(r"preempted for request cmpl-\S+, as it lacked KV blocks; 2\d\d tokens", preempted[0])
    assert re.search(r"admitted again after [\d.]+ m?s; \d+ tokens? to be computed again", preempted[0])
    assert re.search(r"decoded 59 further tokens, [\d.]+ ms for each of its steps", texts[0])

    # They took the blocks of the first prompt.
    again = complete(server, prompt)
    assert reasons(again)[0][0] == "evicted"
    assert re.search(
        r"it was cached, and its blocks were evicted for other requests, [\d.]+ m?s before", told(server, again)
    )
    assert server.metric("octavo:prefix_cache_missed_tokens_total", reason="evicted") >= 16
    missed = sum(server.metric("octavo:prefix_cache_missed_tokens_total", reason=reason) for reason in REASONS)
    assert missed == server.metric("octavo:prompt_tokens_computed_total")

    listed = why(server, "--slowest", "4", "--decisions", "1000")
    assert all(answer["id"] in listed for answer in answers)
    assert re.search(r"evicted: \d+ blocks? of the prefix cache", listed)
    assert "preempted cmpl-" in listed
    assert server.stop() == 0
    assert "Traceback" not in server.output()


@pytest.mark.slow
@pytest.mark.parametrize("flag", ["--data-parallel-size", "--api-server-count"])
def test_every_process_finds_the_requests_of_all(start_server: Callable[..., Server], flag: str) -> None:
    server = start_server(flag, "2")
    alone = httpx.Limits(max_keepalive_connections=0)
    with httpx.Client(base_url=server.url, timeout=WAIT_S, limits=alone) as client:

        def ask(number: int) -> str:
            body = {"model": "smollm2", "prompt": [number + 5] * 40, "max_tokens": 20, "temperature": 0}
            found: str = client.post("/v1/completions", json=body).json()["id"]
            return found

        for name in together(ask, range(6)):
            for _ in range(6):  # whichever process gets the connection
                text = "\n".join(client.get(f"/debug/requests/{name}").json()["text"])
                assert "ended in the engine: " in text
                assert "ended in the server (" in text
        listed = client.get("/debug/timeline").json()
        assert len(listed["slowest"]) == 6
        assert client.get("/debug/requests/nobody").status_code == 404
