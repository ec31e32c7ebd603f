"""What several models behind one server cost: the front process, and the exchange of two models.

    python benchmarks/several_models.py [MODEL] [--rounds 5] [--streams 16] [--tokens 64] [--short 60] [--switches 4]
        [--settings ...] [--output FILE]

`octavo serve MODEL` and a server of two models, both of MODEL, run at once; requests alternate between them in rounds:
    short    milliseconds of a chat of one token, one request at a time: the difference is what the front process adds;
             the 10th percentile of a round, since other work on the machine only adds to it
    streams  tokens a second of that many streams at once
    front    CPU milliseconds of the front process for each short request and for each streamed token, which hang less
             on other work than times do
    switch   seconds of a request for the model that is not loaded, after the other one has been idle for longer than
             its linger; and seconds of the load in it, from the metrics
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
from machine import describe, describe_gpu

READY_S = 600
PROMPT = [{"role": "user", "content": "Count from one to one hundred."}]


class Server:
    """A server process, and a client of it."""

    def __init__(self, log: Path, *arguments: str) -> None:
        self.log = log
        self.has_text = "--skip-tokenizer-init" not in arguments
        self.socket = str(log.with_suffix(".sock"))
        command = [sys.executable, "-m", "octavo.cli.main", "serve", *arguments, "--uds", self.socket]
        with log.open("wb") as output:
            self.process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        transport = httpx.HTTPTransport(uds=self.socket)
        self.http = httpx.Client(transport=transport, base_url="http://octavo", timeout=READY_S)
        deadline = time.monotonic() + READY_S
        while True:
            with contextlib.suppress(httpx.TransportError):
                if self.http.get("/ready").status_code == 200:
                    break
            assert self.process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)

    def close(self) -> None:
        """Stop the server."""
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(60)
        self.http.close()

    def cpu_ms(self) -> float:
        """CPU time of this process's main thread, which serves HTTP."""
        return int(Path(f"/proc/{self.process.pid}/schedstat").read_text().split()[0]) / 1e6

    def chat(self, model: str, tokens: int, **fields: Any) -> dict[str, Any]:
        body = {"model": model, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        if self.has_text:
            path, asked = "/v1/chat/completions", {"messages": PROMPT}
        else:
            path, asked = "/v1/completions", {"prompt": [1, 2, 3]}
        answer = self.http.post(path, json=body | asked | fields)
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    def stream(self, model: str, tokens: int) -> int:
        """Read a stream to its end. Return its tokens."""
        body = {"model": model, "messages": PROMPT, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        lines = 0
        transport = httpx.HTTPTransport(uds=self.socket)
        with (
            httpx.Client(transport=transport, base_url="http://octavo", timeout=READY_S) as http,
            http.stream("POST", "/v1/chat/completions", json=body | {"stream": True}) as answer,
        ):
            for line in answer.iter_lines():
                lines += line.startswith("data:")
        assert lines > 2
        return tokens

    def metric(self, name: str) -> float:
        """The sum of a metric's samples."""
        lines = self.http.get("/metrics").text.splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--short", type=int, default=60, help="short requests of a round")
    parser.add_argument("--switches", type=int, default=4)
    parser.add_argument("--only-switches", action="store_true", help="start no server of one model beside the other")
    parser.add_argument("--settings", default="--kv-cache-memory-bytes 256M --max-model-len 2k --spec-method none")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    report = describe() | {"gpu": describe_gpu()}
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        settings = shlex.split(args.settings)
        models = Path(folder) / "models.yaml"
        models.write_text(f"first: {args.model}\nsecond: {args.model}\n")
        several = ("--models", str(models), "--min-model-turn", "0")
        pool = stack.enter_context(contextlib.closing(Server(Path(folder) / "pool.log", *several, *settings)))
        if not args.only_switches:
            with contextlib.closing(Server(Path(folder) / "alone.log", args.model, *settings)) as alone:
                compare(report, {"alone": (alone, args.model), "pool": (pool, "first")}, args)
        pool.chat("first", 1)
        report["switches"] = [switch(pool, ("second", "first")[turn % 2]) for turn in range(args.switches)]
        report["pool_log"] = [line for line in pool.log.read_text().splitlines() if " was " in line or " fell " in line]
    write(report, args.output)


def compare(report: dict[str, Any], names: dict[str, tuple[Server, str]], args: argparse.Namespace) -> None:
    """Measure short requests and streams of both servers in turns."""
    report["short_ms"], report["streams_tokens_per_s"] = {name: [] for name in names}, {name: [] for name in names}
    for server, model in names.values():
        server.chat(model, 8)
    front = names["pool"][0]
    report["front_cpu_ms_per_request"], report["front_cpu_ms_per_token"] = [], []
    for _ in range(args.rounds):
        for name, (server, model) in names.items():
            before = front.cpu_ms()
            report["short_ms"][name].append(round(short(server, model, args.short), 3))
            if server is front:
                report["front_cpu_ms_per_request"].append(round((front.cpu_ms() - before) / args.short, 4))
        for name, (server, model) in names.items():
            before = front.cpu_ms()
            speed = streams(server, model, args.streams, args.tokens)
            report["streams_tokens_per_s"][name].append(round(speed, 1))
            if server is front:
                used = (front.cpu_ms() - before) / (args.streams * args.tokens)
                report["front_cpu_ms_per_token"].append(round(used, 4))
        print(report["short_ms"], report["streams_tokens_per_s"], flush=True)
    report["medians"] = {
        part: {name: statistics.median(values) for name, values in report[part].items()}
        for part in ("short_ms", "streams_tokens_per_s")
    } | {part: statistics.median(report[part]) for part in ("front_cpu_ms_per_request", "front_cpu_ms_per_token")}


def short(server: Server, model: str, count: int) -> float:
    """The 10th percentile of a request's milliseconds."""
    times = []
    for _ in range(count):
        began = time.perf_counter()
        server.chat(model, 1)
        times.append(time.perf_counter() - began)
    return statistics.quantiles(times, n=10)[0] * 1000


def streams(server: Server, model: str, count: int, tokens: int) -> float:
    """Tokens a second of streams that begin at once."""
    with ThreadPoolExecutor(count) as threads:
        began = time.perf_counter()
        total = sum(threads.map(lambda _: server.stream(model, tokens), range(count)))
        return total / (time.perf_counter() - began)


def switch(server: Server, model: str) -> dict[str, float]:
    """Seconds of a request for a model that is not loaded, and of the load."""
    before = server.metric("octavo:pool_load_seconds_total")
    time.sleep(before)  # longer than the linger of the model that is loaded
    began = time.perf_counter()
    server.chat(model, 1)
    seconds = time.perf_counter() - began
    load = server.metric("octavo:pool_load_seconds_total") - before
    return {"request_s": round(seconds, 2), "load_s": round(load, 2)}


def write(report: dict[str, Any], path: Path | None) -> None:
    import json

    text = json.dumps(report, indent=1)
    print(text)
    if path is not None:
        path.write_text(text + "\n")


if __name__ == "__main__":
    os.environ.setdefault("OCTAVO_DATA", tempfile.mkdtemp())
    main()
