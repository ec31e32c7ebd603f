"""Mixed random load with aborts on one engine, for as long as asked: does anything leak, stall or turn into nonsense?

    python benchmarks/soak.py [--model DIR] [--device cuda] [--seconds 1800] [--output FILE]

Random weights. Prompts of 1 to 3,000 tokens, some with beginnings in common; 1 to 600 tokens to generate; every kind of
sampling; a tenth of the requests is aborted at some point. Every few minutes all requests are let end, and what was
seen so far is written down. It fails if a request ends in an error, if nothing comes for 30 seconds, if blocks or the
bytes that torch holds then are not those of the start, or if never again so few bytes of the device were in use (other
programs may hold some of these).
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from pathlib import Path
from typing import Any

import torch
from machine import describe

from octavo.build import build_core
from octavo.config import EngineConfig
from octavo.core.params import SamplingParams
from octavo.core.request import GenerateRequest
from octavo.engine.loop import EngineLoop
from octavo.hub.files import ModelFiles

HERE = Path(__file__).parent
STALL_S = 30.0
SETTLING_S = 20.0
KINDS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0, "min_tokens": 8},
    {"temperature": 0.8},
    {"temperature": 0.8, "top_p": 0.95, "top_k": 50, "repetition_penalty": 1.1},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 1.2, "min_p": 0.05, "presence_penalty": 0.5, "frequency_penalty": 0.2},
    {"temperature": 0.7, "logprobs": 3},
    {"temperature": 1.0, "top_k": 2000, "logit_bias": {5: 2.0}},
]


class Load:
    """Requests come as long as there is room; `counts` and `failures` tell what became of them.

    `alive` holds how many more tokens each request is waited for before it is aborted.
    """

    def __init__(self, loop: EngineLoop, args: argparse.Namespace, vocab: int) -> None:
        self.loop = loop
        self.rng = random.Random(args.seed)
        self.args = args
        self.vocab = vocab
        self.heads = [self._ids(256) for _ in range(8)]
        self.alive: dict[str, int] = {}
        self.counts = {"requests": 0, "aborted": 0, "finished": 0, "tokens": 0}
        self.failures: list[str] = []

    def run(self, seconds: float) -> None:
        """Until the time is over and all requests have ended."""
        until = time.monotonic() + seconds
        news = time.monotonic()
        while time.monotonic() < until or self.loop.busy:
            while len(self.alive) < self.args.concurrency and time.monotonic() < until:
                self._add()
            deltas = self.loop.step()
            for delta in deltas:
                self._take(delta)
            for name in [name for name, patience in self.alive.items() if patience < 0]:
                self.counts["aborted"] += 1
                for delta in self.loop.abort(name):
                    self._take(delta)
            if deltas:
                news = time.monotonic()
            elif time.monotonic() - news > STALL_S:
                raise SystemExit(f"stalled: nothing came for {STALL_S} s with {len(self.alive)} requests alive")
        self.loop.check_idle()

    def _add(self) -> None:
        rng = self.rng
        prompt = self._ids(round(rng.uniform(1, self.args.max_prompt**0.5) ** 2))
        if rng.random() < 0.3:
            prompt = rng.choice(self.heads) + prompt
        name = f"r{self.counts['requests']}"
        how = dict(rng.choice(KINDS))
        params = SamplingParams(
            max_tokens=rng.randint(9, self.args.max_output), ignore_eos=True, seed=rng.getrandbits(40), **how
        )
        self.loop.add(GenerateRequest(id=name, tokens=prompt, params=params))
        self.alive[name] = rng.randrange(self.args.max_output) if rng.random() < 0.1 else self.args.max_output
        self.counts["requests"] += 1

    def _take(self, delta: Any) -> None:
        self.counts["tokens"] += len(delta.tokens)
        if delta.error is not None:
            self.failures.append(f"{delta.id}: {delta.error}")
        if any(not 0 <= token < self.vocab for token in delta.tokens):
            self.failures.append(f"{delta.id}: a token outside the vocabulary")
        if delta.id in self.alive:
            self.alive[delta.id] -= len(delta.tokens)
        if delta.finish is not None:
            self.counts["finished"] += 1
            self.alive.pop(delta.id, None)

    def _ids(self, count: int) -> list[int]:
        return [self.rng.randrange(self.vocab) for _ in range(count)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--model", type=Path, default=HERE / "models" / "llama-3.1-8b", help="folder with a config.json"
    )
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--seconds", type=float, default=1800)
    parser.add_argument("--leg", type=float, default=300, help="seconds of load after which all requests are let end")
    parser.add_argument("--concurrency", type=int, default=400)
    parser.add_argument("--max-prompt", type=int, default=3000)
    parser.add_argument("--max-output", type=int, default=600)
    parser.add_argument("--kv-blocks", type=int, default=20_000, help="few, so that requests are preempted too")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()

    machine = describe()
    config = json.loads((args.model / "config.json").read_text())
    files = ModelFiles(name=args.model.name, path=args.model, format="safetensors", weights=(), config=config)
    head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    dtype_bytes = 4 if args.device == "cpu" else 2
    block = 16 * 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * head * dtype_bytes
    settings: dict[str, Any] = {"dtype": "float32"} if args.device == "cpu" else {}
    room = args.kv_blocks * block
    settings |= {"max_model_len": min(8192, config["max_position_embeddings"]), "memory_bytes": room}
    loop, info = build_core(EngineConfig.of(load_format="dummy", device=args.device, **settings), files)
    load = Load(loop, args, info.vocab_size)
    load.run(min(SETTLING_S, args.seconds / 4))
    before = in_use(loop)
    report: dict[str, Any] = {"machine": machine, "device": info.device, "before": before, "legs": []}
    began = time.monotonic()
    while (left := began + args.seconds - time.monotonic()) > 0:
        load.run(min(args.leg, left))
        report |= so_far(load, time.monotonic() - began)
        report["legs"].append({"seconds": report["seconds"], "requests": load.counts["requests"], **in_use(loop)})
        print(json.dumps(report["legs"][-1]), flush=True)
        if args.output:
            args.output.write_text(json.dumps(report, indent=1) + "\n")
        if load.failures or holds_more(report["legs"][-1:], before, "blocks", "allocated"):
            break
    print(json.dumps(report, indent=1))
    loop.close()
    leaks = holds_more(report["legs"][-1:], before, "blocks", "allocated") or holds_more(
        report["legs"], before, "device"
    )
    sys.exit(bool(load.failures) or leaks)


def so_far(load: Load, seconds: float) -> dict[str, Any]:
    stats = load.loop.stats()
    return {
        "seconds": round(seconds, 1),
        **load.counts,
        "steps": stats.num_steps,
        "preemptions": stats.num_preemptions,
        "failures": load.failures[:20],
    }


def holds_more(legs: list[dict[str, Any]], before: dict[str, int], *names: str) -> bool:
    """Whether after each of these legs more of one of these was in use than before."""
    return any(name in before and min(leg[name] for leg in legs) > before[name] for name in names)


def in_use(loop: EngineLoop) -> dict[str, int]:
    """Blocks held by requests, and bytes that torch and all others hold on the device."""
    found = {"blocks": loop.stats().num_blocks_used}
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info()
        found |= {"allocated": torch.cuda.memory_allocated(), "device": total - free}
    return found


if __name__ == "__main__":
    main()
