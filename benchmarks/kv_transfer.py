"""A server that has its prompts computed by another one, beside servers that compute their own.

    python benchmarks/kv_transfer.py [--model smollm2] [--sizes 500,2000] [--streams 4] [--prompt 1500] [--rate 0.4]
        [--seconds 30] [--cpus] [--gpus] [--first ARGS] [--second ARGS] [--output FILE]

Starts a server that computes prompts and one that decodes, on one machine. Parts:
    first   for each size of prompt, the time to the first token at the second server: `here` it computes the prompt,
            `fetched` the first server has computed it before, `asked` it asks the first server. Medians of `--rounds`.
    gaps    `--streams` answers are streamed all the time while prompts of `--prompt` tokens arrive at random times,
            `--rate` a second, each with a short answer. `mixed`: each server takes half of both and computes its own
            prompts. `apart`: the second server takes all, and asks the first for long prompts. Percentiles of the gaps
            between two tokens of the streams, their tokens a second, and the time to first token of the prompts.

Prompts are random tokens, times are measured at the client. `--cpus` gives each server half of the cores, `--gpus` a
GPU.
"""

from __future__ import annotations

import argparse
import http.client
import itertools
import json
import os
import random
import shlex
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from machine import Report, describe, describe_gpu

LOCAL = {"do_remote_prefill": False, "do_remote_decode": False}
SENT = {"do_remote_prefill": False, "do_remote_decode": True}
START_S = 300


class Server:
    """`octavo serve` in a process of its own."""

    def __init__(self, model: str, cpus: Sequence[int], gpu: str | None, args: Sequence[str], log: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port: int = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._log = log
        command = [sys.executable, "-m", "octavo.cli.main", "serve", model, "--port", str(self.port), *args]
        pinned = ["taskset", "-c", ",".join(map(str, cpus))] if cpus else []
        seen = os.environ | ({} if gpu is None else {"CUDA_VISIBLE_DEVICES": gpu})
        with log.open("wb") as output:
            self._process = subprocess.Popen([*pinned, *command], stdout=output, stderr=subprocess.STDOUT, env=seen)

    def wait(self) -> None:
        for _ in range(START_S * 10):
            if self._process.poll() is not None:
                break
            try:
                urllib.request.urlopen(f"{self.url}/ready", timeout=5).close()
                return
            except OSError:
                time.sleep(0.1)
        raise SystemExit(f"a server did not start:\n{self._log.read_text()}")

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait(60)

    def post(self, body: dict[str, Any]) -> Any:
        data = json.dumps(body).encode()
        request = urllib.request.Request(f"{self.url}/v1/completions", data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=300) as answer:
            return json.load(answer)

    def times(self, body: dict[str, Any]) -> Iterator[float]:
        """Stream an answer; yield the time of each event."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=300)
        connection.request("POST", "/v1/completions", json.dumps(body | {"stream": True}), {})
        response = connection.getresponse()
        if response.status != http.client.OK:
            raise SystemExit(response.read().decode())
        for line in response:
            if line.startswith(b"data: {"):
                yield time.perf_counter()
        connection.close()


def body(prompt: list[int], tokens: int, params: dict[str, Any] | None = None) -> dict[str, Any]:
    found = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    return found if params is None else found | {"kv_transfer_params": params}


def drawn(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(1000, 40_000) for _ in range(count)]


def first(args: argparse.Namespace, one: Server, two: Server) -> Iterator[tuple[str, Any]]:
    rng = random.Random(1)
    for size in [args.sizes[0], *args.sizes]:  # the first warms up
        found: dict[str, list[float]] = {"here": [], "fetched": [], "asked": []}
        for _ in range(args.rounds):
            for name, seconds in found.items():
                prompt = drawn(rng, size)
                params = LOCAL if name == "here" else None
                if name == "fetched":
                    params = one.post(body(prompt, 1, SENT))["kv_transfer_params"]
                began = time.perf_counter()
                seconds.append(next(two.times(body(prompt, 1, params))) - began)
        yield str(size), {name: round(1e3 * statistics.median(seconds), 2) for name, seconds in found.items()}


@dataclass
class Load:
    """Streams that never end, and prompts that arrive, until `until`."""

    until: float
    gaps: list[float] = field(default_factory=list)
    tokens: int = 0
    ttfts: list[float] = field(default_factory=list)

    def stream(self, server: Server, seed: int, params: dict[str, Any] | None, tokens: int) -> None:
        rng = random.Random(seed)
        while time.perf_counter() < self.until:
            at = list(server.times(body(drawn(rng, 16), tokens, params)))
            self.gaps += [after - before for before, after in itertools.pairwise(at)]
            self.tokens += sum(moment < self.until for moment in at)

    def prompt(self, server: Server, prompt: list[int], params: dict[str, Any] | None) -> None:
        began = time.perf_counter()
        self.ttfts.append(next(server.times(body(prompt, 1, params))) - began)


def gaps(args: argparse.Namespace, one: Server, two: Server, *, apart: bool) -> dict[str, float]:
    servers = [two, two] if apart else [one, two]
    params = None if apart else LOCAL
    load = Load(time.perf_counter() + args.seconds)
    threads = [
        threading.Thread(target=load.stream, args=(servers[number % 2], number, params, args.tokens))
        for number in range(args.streams)
    ]
    rng = random.Random(args.seed)
    args.seed += 1
    for thread in threads:
        thread.start()
    number = 0
    while time.perf_counter() + (pause := rng.uniform(0.5, 1.5) / args.rate) < load.until:
        time.sleep(pause)
        asking = threading.Thread(target=load.prompt, args=(servers[number % 2], drawn(rng, args.prompt), params))
        asking.start()
        threads.append(asking)
        number += 1
    for thread in threads:
        thread.join()
    cuts = statistics.quantiles(load.gaps, n=1000)
    return {
        "gap_p50_ms": round(1e3 * cuts[499], 2),
        "gap_p99_ms": round(1e3 * cuts[989], 2),
        "gap_p999_ms": round(1e3 * cuts[998], 2),
        "tokens_per_s": round(load.tokens / args.seconds, 1),
        "prompts": number,
        "ttft_p50_ms": round(1e3 * statistics.median(load.ttfts), 1),
        "ttft_most_ms": round(1e3 * max(load.ttfts), 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--sizes", type=lambda text: [*map(int, text.split(","))], default=[500, 2000])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--streams", type=int, default=4, help="0 leaves out the second part")
    parser.add_argument("--tokens", type=int, default=400, help="of a stream's answer")
    parser.add_argument("--prompt", type=int, default=1500)
    parser.add_argument("--rate", type=float, default=0.4)
    parser.add_argument("--seconds", type=float, default=30)
    parser.add_argument("--buffer", default="256M", help="kv_buffer_size of the first server")
    parser.add_argument("--cpus", action="store_true", help="half of the cores for each server")
    parser.add_argument("--gpus", action="store_true", help="a GPU for each server")
    parser.add_argument("--first", type=shlex.split, default=[], help="arguments of the first server")
    parser.add_argument("--second", type=shlex.split, default=[], help="arguments of the second server")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    args.seed = 10
    report = Report(describe() | {"gpu": describe_gpu()}, args.output)
    cores = sorted(os.sched_getaffinity(0))
    half = len(cores) // 2 if args.cpus else 0
    with tempfile.TemporaryDirectory() as folder:
        role = ["--kv-transfer-config.kv_role", "kv_producer", "--kv-transfer-config.kv_buffer_size", args.buffer]
        gpus = ("0", "1") if args.gpus else (None, None)
        one = Server(args.model, cores[:half], gpus[0], [*role, *args.first], Path(folder) / "first")
        asking = ["--prefill-servers", one.url, *args.second]
        two = Server(args.model, cores[half:] if half else [], gpus[1], asking, Path(folder) / "second")
        try:
            one.wait()
            two.wait()
            for name, found in first(args, one, two):
                report.note(f"first_token_ms_{name}", found)
            for turn, apart in enumerate((False, True) * 2 if args.streams else ()):
                report.note(f"{'apart' if apart else 'mixed'}_{turn // 2}", gaps(args, one, two, apart=apart))
        finally:
            one.stop()
            two.stop()


if __name__ == "__main__":
    main()
