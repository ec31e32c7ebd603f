"""A server of two API processes records what OpenAI's client sends; the record is sent again, and simulated."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import openai
import pytest
from serving import Server, together

from octavo.bench.traces import read_trace

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

SYSTEM = "You are a careful assistant who answers in one short sentence and never repeats the question. " * 3


def octavo(*words: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "octavo.cli.main", *words], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_what_clients_send_is_recorded_replayed_and_simulated(
    start_server: Callable[..., Server], tmp_path: Path
) -> None:
    trace, profile = tmp_path / "trace.jsonl", tmp_path / "profile.json"
    server = start_server("--record-traffic", str(trace), "--api-server-count", "2", "--spec-method", "none")

    def ask(number: int) -> str:
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            answer = client.chat.completions.create(
                model="smollm2",
                messages=[
                    {"role": "system", "content": SYSTEM},
                    {"role": "user", "content": f"What is a zebra-{number}?"},
                ],
                max_tokens=8 + number,
            )
        assert answer.usage is not None
        return f"{answer.usage.prompt_tokens} {answer.usage.completion_tokens}"

    usage = together(ask, range(6))
    recorded = read_trace(trace)
    assert sorted(f"{one.prompt_tokens} {one.output_tokens}" for one in recorded) == sorted(usage)
    assert sorted(one.max_tokens or 0 for one in recorded) == [8 + number for number in range(6)]
    assert len({tuple(one.blocks[:3]) for one in recorded}) == 1  # the system prompt
    text = trace.read_text()
    assert "zebra" not in text
    assert "careful" not in text

    timed = ("--dataset-name", "timed_trace", "--dataset-path", str(trace), "--num-prompts", "6")
    octavo("bench", "serve", *timed, "--port", str(server.port), "--ignore-eos", "--tokenizer", "smollm2")
    replayed = [json.loads(line) for line in trace.read_text().splitlines()][6:]
    assert sorted((one["input_length"], one["output_length"]) for one in replayed) == sorted(
        (one.prompt_tokens, one.output_tokens) for one in recorded
    )
    assert any(one["cached"] for one in replayed)
    assert server.stop() == 0
    settings = ("--kv-cache-memory-bytes", "256M", "--max-model-len", "2048", "--spec-method", "none")
    octavo("bench", "steps", "smollm2", *settings, "--output", str(profile), "--rounds", "1", "--seconds", "5")
    shown = octavo("simulate", "--trace", str(trace), "--profile", str(profile))
    assert "Successful requests:                    12" in shown
