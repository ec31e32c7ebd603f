"""Hundreds of LoRA adapters behind one server, beside the base model alone at the same load.

    python benchmarks/lora_server.py [--model DIR] [--adapters 500] [--seconds 10] [--output FILE]

The model and the adapters have random weights. The adapters change all linear layers; their ranks are those of
`--ranks` in turns. Adapters of one rank share a file on the disk, which is in the page cache, but nothing in the
server.

Parts, in this order, against one server that knows all adapters (`--lora-dir`):
    capacity    requests a second of the base model, with `--streams` of them at a time
    base        requests to the base model, at `--share` of the capacity, at random times (a Poisson process)
    warm        one request to each adapter that the next part names, so that all of them are in memory, as in a server
                that has run for long
    adapters    the requests of `base` at the same times, each to an adapter drawn by Zipf's law
    own         the last two parts again at `--share` of the requests a second that the server answers with adapters,
                `--streams` of them at a time
    cold        first requests to adapters of rank 16 that were never used, in an idle server and beside streams of the
                base model: their time to first token beside those of the base model and of second requests, how much of
                it the server says it was in which part, and the longest gap between two tokens of the streams
    memory      tokens that fit into the KV cache beside 20 adapters, and beside 20 slots of rank 64

Times to first token and gaps are measured at the client's socket. The file is written after each part. Without options
all parts take about 110 seconds on an H200.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import math
import os
import random
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from machine import Report, describe, describe_gpu

HERE = Path(__file__).parent
FIRST_ID, IDS = 1000, 20_000
"""Tokens of prompts are drawn from this range; a small vocabulary narrows it."""
FIXED_RANK = 64
SETTLED_S = 0.2
RESIDENT = 20


@dataclass(slots=True)
class Stream:
    """One answer: seconds from sending to each piece, and why it failed."""

    at: list[float] = field(default_factory=list)
    error: str = ""

    @property
    def ttft(self) -> float:
        return self.at[0]

    @property
    def gaps(self) -> list[float]:
        return [b - a for a, b in itertools.pairwise(self.at)]


class Adapters:
    """Folders of adapters with random weights, in PEFT's form."""

    def __init__(self, folder: Path, config: dict[str, Any], ranks: Sequence[int], count: int) -> None:
        self.folder = folder
        self.ranks = list(ranks)
        self.config = config
        self.names = [f"adapter-{number:03}" for number in range(count)]
        self.cold = [f"cold-{number}" for number in range(8)]
        files = {rank: self._weights(rank) for rank in sorted({*ranks, 16})}
        for number, name in enumerate(self.names):
            self._adapter(name, self.rank_of(number), files)
        for name in self.cold:
            self._adapter(name, 16, files)

    def rank_of(self, number: int) -> int:
        return self.ranks[number % len(self.ranks)]

    def bytes_of_rank(self, rank: int) -> int:
        """Bytes of an adapter, in two-byte elements."""
        return 2 * rank * sum(rows + columns for rows, columns in self._shapes().values()) * self.layers

    @property
    def layers(self) -> int:
        return int(self.config["num_hidden_layers"])

    def _shapes(self) -> dict[str, tuple[int, int]]:
        """Return path in a layer -> (out_features, in_features)."""
        c = self.config
        hidden, inner = c["hidden_size"], c["intermediate_size"]
        width = c.get("head_dim") or hidden // c["num_attention_heads"]
        queries, keys = c["num_attention_heads"] * width, c["num_key_value_heads"] * width
        attention = {"q_proj": (queries, hidden), "k_proj": (keys, hidden), "v_proj": (keys, hidden)}
        attention["o_proj"] = (hidden, queries)
        mlp = {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}
        return {f"self_attn.{k}": v for k, v in attention.items()} | {f"mlp.{k}": v for k, v in mlp.items()}

    def _weights(self, rank: int) -> Path:
        import torch
        from safetensors.torch import save_file

        drawn = torch.Generator().manual_seed(rank)
        tensors = {}
        for path, (rows, columns) in self._shapes().items():
            a = torch.randn(rank, columns, generator=drawn) / math.sqrt(columns)
            b = torch.randn(rows, rank, generator=drawn) * 0.01
            for layer in range(self.layers):
                base = f"base_model.model.model.layers.{layer}.{path}"
                tensors[f"{base}.lora_A.weight"] = a.bfloat16().clone()
                tensors[f"{base}.lora_B.weight"] = b.bfloat16().clone()
        file = self.folder / f"rank-{rank}.safetensors"
        save_file(tensors, file)
        return file

    def _adapter(self, name: str, rank: int, files: dict[int, Path]) -> None:
        folder = self.folder / name
        folder.mkdir()
        targets = sorted({path.rpartition(".")[2] for path in self._shapes()})
        stated = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "bias": "none", "target_modules": targets}
        (folder / "adapter_config.json").write_text(json.dumps(stated))
        (folder / "adapter_model.safetensors").symlink_to(files[rank])


class Server:
    """`octavo serve` in a process of its own."""

    def __init__(self, args: argparse.Namespace, adapters: Adapters) -> None:
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            self.port = int(sock.getsockname()[1])
        command = [sys.executable, "-m", "octavo.cli.main", "serve", str(args.model), "--load-format", "dummy"]
        command += ["--served-model-name", "base", "--port", str(self.port), "--max-model-len", str(args.max_model_len)]
        command += ["--lora-dir", str(adapters.folder), "--max-lora-rank", str(max(*adapters.ranks, 16))]
        most = str(args.max_loras)
        command += ["--max-loras", most, "--max-cpu-loras", most]
        command += ["--server-dev-mode", "--skip-tokenizer-init", *args.serve_args]
        began = time.perf_counter()
        self.process = subprocess.Popen(command, stdout=sys.stderr, start_new_session=True)
        while not self._ready():
            if self.process.poll() is not None:
                raise SystemExit("the server ended while it started")
            time.sleep(0.2)
        self.start_s = time.perf_counter() - began

    def _ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/ready", timeout=5) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def metrics(self) -> dict[str, float]:
        """Return the engine's samples, summed over their labels, except that a place is part of the name."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=30) as answer:
            text = answer.read().decode()
        found: dict[str, float] = {}
        for line in text.splitlines():
            if line.startswith("octavo:"):
                name, _, value = line.removeprefix("octavo:").rpartition(" ")
                place = re.search(r'place="(\w+)"', name)
                name = name.partition("{")[0] + (f"_{place[1]}" if place else "")
                found[name] = found.get(name, 0.0) + float(value)
        return found

    def info(self) -> dict[str, Any]:
        """Return the engine's facts about the model and the KV cache."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/server_info?config_format=json") as answer:
            found: dict[str, Any] = json.load(answer)["vllm_config"]["model"]
        return found

    async def ask(self, model: str, prompt: list[int], count: int) -> Stream:
        """Stream one completion; its failure is in the result."""
        fields = {"model": model, "prompt": prompt, "max_tokens": count, "temperature": 0, "ignore_eos": True}
        body = json.dumps(fields | {"stream": True, "return_token_ids": True, "detokenize": False}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\nConnection: close\r\n"
        made = Stream()
        began = time.perf_counter()
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(head.encode() + b"Content-Type: application/json\r\n\r\n" + body)
        last = b""
        while piece := await reader.read(1 << 16):
            if b"data: {" in piece:
                made.at.append(time.perf_counter() - began)
            last = (last + piece)[-2000:]
        writer.close()
        if b"data: [DONE]" not in last or b'"error"' in last:
            made.error = last.decode("utf-8", "replace")
        return made

    def close(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)


class Load:
    """Requests of one size, with prompts of their own."""

    def __init__(self, args: argparse.Namespace, config: dict[str, Any], server: Server) -> None:
        self.args, self.server = args, server
        self.ids = random.Random(0)
        self.last_id = min(FIRST_ID + IDS, config["vocab_size"])
        self.first_id = min(FIRST_ID, self.last_id // 2)

    def prompt(self) -> list[int]:
        return [self.ids.randrange(self.first_id, self.last_id) for _ in range(self.args.input_len)]

    def ask(self, model: str, count: int | None = None) -> Awaitable[Stream]:
        return self.server.ask(model, self.prompt(), count or self.args.output_len)

    async def at_once(self, models: Sequence[str], streams: int, count: int | None = None) -> float:
        """Send a request to each of the models, `streams` at a time; return requests a second.

        Args:
            count: tokens of an answer.
        """
        gate = asyncio.Semaphore(streams)

        async def one(model: str) -> Stream:
            async with gate:
                return await self.ask(model, count)

        began = time.perf_counter()
        checked(await asyncio.gather(*map(one, models)))
        return len(models) / (time.perf_counter() - began)

    async def poisson(self, models: Sequence[str], rate: float, seed: int) -> list[Stream]:
        """Send a request to each of the models, in this order, at random times."""
        times = random.Random(seed)
        began, at = time.perf_counter(), 0.0
        sent = []
        for model in models:
            at += times.expovariate(rate)
            await asyncio.sleep(max(0.0, began + at - time.perf_counter()))
            sent.append(asyncio.ensure_future(self.ask(model)))
        return checked(await asyncio.gather(*sent))


def checked(streams: list[Stream]) -> list[Stream]:
    odd = [one for one in streams if one.error or not one.at]
    if odd:
        raise SystemExit(f"{len(odd)} of {len(streams)} requests failed, such as: {odd[0].error}")
    return streams


def zipf(names: Sequence[str], exponent: float, count: int, seed: int) -> list[str]:
    """Draw names; the n-th has the weight n^-exponent. Their order is shuffled, so that all ranks are popular."""
    drawn = random.Random(seed)
    order = list(names)
    drawn.shuffle(order)
    return drawn.choices(order, [(place + 1) ** -exponent for place in range(len(order))], k=count)


def figures(streams: Sequence[Stream]) -> dict[str, float]:
    first = sorted(one.ttft for one in streams)
    gaps = sorted(gap for one in streams for gap in one.gaps)
    return {
        "requests": len(streams),
        "ttft_p50_ms": milliseconds(quantile(first, 0.5)),
        "ttft_p99_ms": milliseconds(quantile(first, 0.99)),
        "gap_p50_ms": milliseconds(quantile(gaps, 0.5)),
        "gap_p99_ms": milliseconds(quantile(gaps, 0.99)),
    }


def quantile(ordered: Sequence[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def milliseconds(seconds: float) -> float:
    return round(seconds * 1e3, 2)


def grown(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    """Return how far the counters of adapters have grown, and their gauges."""
    names = [name for name in after if name.startswith("lora_")]
    return {n: round(after[n] - (before.get(n, 0.0) if n.endswith("_total") else 0.0), 4) for n in sorted(names)}


async def cold(load: Load, adapters: Adapters) -> dict[str, Any]:
    """Load adapters that were never used, one after the other, in an idle server and beside streams."""
    half = len(adapters.cold) // 2
    beside = {}
    found = await firsts(load, adapters.cold[:half])
    for name, models in (("without", ["base"] * half), ("with", adapters.cold[half:])):
        streams = [asyncio.ensure_future(load.ask("base", load.args.output_len * 4)) for _ in range(8)]
        await asyncio.sleep(0.3)
        beside[name] = await firsts(load, models)
        running = checked(await asyncio.gather(*streams))
        longest = max(max(one.gaps, default=0.0) for one in running)
        beside[name]["longest_gap_of_streams_ms"] = milliseconds(longest)
    facts = {"rank": 16, "megabytes": round(adapters.bytes_of_rank(16) / 1e6, 1)}
    return facts | found | {"beside_streams": beside}


async def firsts(load: Load, models: Sequence[str]) -> dict[str, float]:
    """Return the times to first token of the base model, of first requests to these models and of second ones, and what
    the server says about each adapter that it loaded for them.

    server_read_ms is until it can be loaded, some of it while the request is on its way; server_load_ms is from then
    until it is on the device; server_wait_ms is what the requests waited for both. The rest of the difference to second
    requests is the search for the name.
    """
    base = [checked([await load.ask("base", 2)])[0].ttft for _ in models]
    before = await asyncio.to_thread(load.server.metrics)  # not in the loop that reads the streams
    first = [checked([await load.ask(name, 2)])[0].ttft for name in models]
    await asyncio.sleep(SETTLED_S)  # counters come with a step's output, at most 20 times a second
    parts = grown(before, await asyncio.to_thread(load.server.metrics))
    second = [checked([await load.ask(name, 2)])[0].ttft for name in models]
    medians = {"base": statistics.median(base), "first": statistics.median(first), "second": statistics.median(second)}
    told = {f"{name}_ttft_ms": milliseconds(value) for name, value in medians.items()}
    told["load_ms"] = milliseconds(medians["first"] - medians["base"])
    count = max(1, round(parts["lora_loads_total"]))
    for name in ("read", "load", "wait"):
        told[f"server_{name}_ms"] = milliseconds(parts[f"lora_{name}_seconds_total"] / count)
    return told | {"loads": parts["lora_loads_total"]}


def memory(server: Server, adapters: Adapters) -> dict[str, Any]:
    """Return tokens of KV cache beside 20 adapters, by their bytes, and beside 20 slots of the largest rank."""
    info = server.info()
    blocks, size, per_token = info["num_blocks"], info["block_size"], info["kv_bytes_per_token"]
    page = size * per_token
    mixed = sum(math.ceil(adapters.bytes_of_rank(adapters.rank_of(number)) / page) for number in range(RESIDENT))
    slots = RESIDENT * math.ceil(adapters.bytes_of_rank(FIXED_RANK) / page)
    return {
        "kv_tokens_without_adapters": blocks * size,
        f"kv_tokens_beside_{RESIDENT}_adapters": (blocks - mixed) * size,
        f"kv_tokens_beside_{RESIDENT}_slots_of_rank_{FIXED_RANK}": (blocks - slots) * size,
        "blocks_of_adapters_now": server.metrics().get("lora_blocks"),
        "adapters_on_device_now": server.metrics().get("lora_adapters_device"),
    }


async def measure(args: argparse.Namespace, adapters: Adapters, server: Server, report: Report) -> None:
    load = Load(args, adapters.config, server)
    await load.at_once(["base"] * args.streams, args.streams)
    capacity = await load.at_once(["base"] * args.streams * 2, args.streams)
    rate = capacity * args.share
    report.note("capacity_req_s", round(capacity, 2))
    report.note("rate_req_s", round(rate, 2))
    base = await alone(load, rate)
    report.note("base", base)
    chosen = zipf(adapters.names, args.zipf, max(count_of(args, rate), args.streams * 2), seed=3)
    began = time.perf_counter()
    await load.at_once(sorted(set(chosen)), args.warm_streams, 2)
    report.note("warm_s", round(time.perf_counter() - began, 1))
    found = await named(load, rate, chosen)
    report.note("adapters", found)
    report.note("ttft_p99_ratio", round(found["ttft_p99_ms"] / base["ttft_p99_ms"], 3))
    own = await load.at_once(chosen[: args.streams * 2], args.streams)
    slower = own * args.share
    parts = {"capacity_req_s": round(own, 2), "rate_req_s": round(slower, 2)}
    parts |= {"base": await alone(load, slower), "adapters": await named(load, slower, chosen)}
    ratio = parts["adapters"]["ttft_p99_ms"] / parts["base"]["ttft_p99_ms"]
    report.note("own", parts | {"ttft_p99_ratio": round(ratio, 3)})
    report.note("memory", memory(server, adapters))
    report.note("cold", await cold(load, adapters))


def count_of(args: argparse.Namespace, rate: float) -> int:
    return max(8, round(rate * args.seconds))


async def alone(load: Load, rate: float) -> dict[str, Any]:
    """Send requests to the base model."""
    return figures(await load.poisson(["base"] * count_of(load.args, rate), rate, seed=1))


async def named(load: Load, rate: float, chosen: Sequence[str]) -> dict[str, Any]:
    """Send requests to the first of these adapters, at the times of `alone`."""
    names = chosen[: count_of(load.args, rate)]
    before = load.server.metrics()
    found = figures(await load.poisson(names, rate, seed=1))
    return found | {"distinct": len(set(names)), "counters": grown(before, load.server.metrics())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=HERE / "models" / "llama-3.1-8b", help="folder with config.json")
    parser.add_argument("--adapters", type=int, default=500)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 16, 32, 64])
    parser.add_argument("--zipf", type=float, default=1.0, help="exponent of the law by which adapters are drawn")
    parser.add_argument("--share", type=float, default=0.6, help="of the base model's capacity")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each of the two loads")
    parser.add_argument("--max-loras", type=int, default=512, help="of the server, on the device and on the host")
    parser.add_argument("--warm-streams", type=int, default=32, help="concurrent first requests to adapters")
    parser.add_argument("--streams", type=int, default=256, help="concurrent requests that measure the capacity")
    parser.add_argument("--input-len", type=int, default=200)
    parser.add_argument("--output-len", type=int, default=100)
    parser.add_argument("--max-model-len", type=int, default=4096)
    parser.add_argument("--output", type=Path)
    parser.add_argument("serve_args", nargs="*", help="further arguments of octavo serve (put -- before them)")
    args = parser.parse_args()

    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # ends the server, too
    config = json.loads((args.model / "config.json").read_text())
    with tempfile.TemporaryDirectory(prefix="adapters-") as folder:
        facts = describe() | {"gpu": describe_gpu(), "model": args.model.name, "known_adapters": args.adapters}
        facts |= {"ranks": args.ranks, "zipf": args.zipf, "input_len": args.input_len, "output_len": args.output_len}
        report = Report(facts, args.output)
        adapters = Adapters(Path(folder), config, args.ranks, args.adapters)
        server = Server(args, adapters)
        try:
            report.note("start_s", round(server.start_s, 1))
            asyncio.run(measure(args, adapters, server, report))
        finally:
            server.close()


if __name__ == "__main__":
    main()
