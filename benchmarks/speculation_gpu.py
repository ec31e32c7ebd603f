"""What drafts gain on a GPU if a fixed share of them is accepted, with random weights of real shapes.

    python benchmarks/speculation_gpu.py [--ways plain synthetic model head tree] [--streams 1 16 256]
        [--acceptance 0.8] [--drafts 5] [--tokens 256] [--model FOLDER] [--ranks 2] [--output FILE]

`synthetic` drafts at no cost, `model` with a drafting model of the 1B shape, `head` with an EAGLE-3 head, `tree` with
one that drafts a tree (`--tree`). A draft is accepted with the given probability whatever it is (in a tree, the second
token after another with this share of what the first leaves), so that figures depend on costs alone, and tokens mean
nothing. Everything else is the
real path: adaptive numbers of drafts, verification in one step, sampling, and one step launched ahead. Greedy, prompts
of 128 random tokens, the second of two equal runs.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import time
from pathlib import Path
from typing import Any

import msgspec
import torch
from machine import describe
from speculation_ranks import ACCEPTANCE, accept_some

from octavo import build, build_worker
from octavo.config import EngineConfig
from octavo.core.params import SamplingParams
from octavo.core.request import GenerateRequest
from octavo.engine.loop import EngineLoop
from octavo.features.speculation.config import DraftConfig
from octavo.features.speculation.engine import SpeculationEngine
from octavo.features.speculation.payload import NAME, SpeculationOption
from octavo.hub.files import ModelFiles
from octavo.worker.drafts import Drafting, Drafts
from octavo.worker.hooks import WorkerHook

HERE = Path(__file__).resolve().parent
MODELS = HERE / "models"


class Synthetic(WorkerHook):
    """Drafts at once: any tokens."""

    name = "speculation"

    def propose(self, drafting: Drafting, payload: Any) -> Drafts | None:
        tokens = drafting.limits[:, None].expand(-1, max(drafting.plan.proposals.values()))
        return Drafts(tokens, drafting.limits)


def accept_in_ranks(share: float) -> None:
    """Start ranks that accept as this process does."""
    os.environ[ACCEPTANCE] = str(share)
    os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
    build.RANK_MODULE = build_worker.RANK_MODULE = "speculation_ranks"


def tree_of(size: int, share: float, depth: int) -> list[tuple[int, ...]]:
    """Return the paths up to this depth that are the likeliest to be accepted, as `accept_some` accepts them."""
    found: list[tuple[int, ...]] = []
    frontier = [(share, (0,))]
    while len(found) < size:
        frontier.sort(reverse=True)
        chance, path = frontier.pop(0)
        found.append(path)
        frontier.append((chance * (1 - share), (*path[:-1], path[-1] + 1)))
        if len(path) < depth:
            frontier.append((chance * share, (*path, 0)))
    return found


def engine(
    way: str, folder: Path, ranks: int, drafts: int | list[tuple[int, ...]], most: int, *, adaptive: bool
) -> EngineLoop:
    config = json.loads((folder / "config.json").read_text())
    files = ModelFiles(name=folder.name, path=folder, format="safetensors", weights=(), config=config)
    settings: dict[str, Any] = {"load_format": "dummy", "device": "cuda", "max_num_seqs": most, "max_model_len": 4096}
    settings |= {"max_num_batched_tokens": 4096, "memory_bytes": 12 << 30, "tensor_parallel_size": ranks}
    halves = build.build_engine_halves, build_worker.build_worker_halves
    if way == "model":
        own = {"method": "draft_model", "model": str(MODELS / "llama-3.2-1b"), "num_speculative_tokens": drafts}
        settings["speculative_config"] = own | {"adaptive": adaptive}
    if way in ("head", "tree"):
        shape = {"num_speculative_tokens" if way == "head" else "speculative_token_tree": drafts}
        own = {"method": "eagle3", "model": str(MODELS / "llama-3.1-8b-eagle3"), "adaptive": adaptive}
        settings["speculative_config"] = own | shape
    if way == "synthetic":
        chosen = DraftConfig(method="ngram", num_speculative_tokens=drafts, adaptive=adaptive)
        build.build_engine_halves = lambda context: [SpeculationEngine(chosen)]
        build_worker.build_worker_halves = lambda context: [Synthetic()]
    loop, _ = build.build_core(EngineConfig.of(**settings), files)
    build.build_engine_halves, build_worker.build_worker_halves = halves
    return loop


def measure(loop: EngineLoop, streams: int, tokens: int, *, drafts: bool) -> dict[str, Any]:
    """Decode `streams` requests at once; the clock starts when all prompts are computed."""
    rng = random.Random(streams)
    params = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True, detokenize=False)
    loop.forget_past()
    for number in range(streams):
        prompt = [rng.randrange(1000, 100_000) for _ in range(128)]
        options = {NAME: msgspec.Raw(msgspec.msgpack.encode(SpeculationOption(num_prompt=len(prompt))))}
        name = f"{time.perf_counter()}-{number}"
        loop.add(GenerateRequest(id=name, tokens=prompt, params=params, options=options if drafts else {}))
    begun: set[str] = set()
    made, began, steps = 0, 0.0, 0
    while loop.busy:
        for delta in loop.step():
            if delta.error:
                raise RuntimeError(delta.error)
            begun.add(delta.id)
            made += len(delta.tokens) if began else 0
        if len(begun) == streams and not began:
            began, steps = time.perf_counter(), loop.stats().num_steps
    seconds = time.perf_counter() - began
    steps = loop.stats().num_steps - steps
    return {"tok_s": round(made / seconds, 1), "ms_a_step": round(seconds / steps * 1e3, 3), "steps": steps}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ways", nargs="+", default=["plain", "synthetic", "model"])
    parser.add_argument("--streams", nargs="+", type=int, default=[1, 16, 256])
    parser.add_argument("--acceptance", type=float, default=0.8)
    parser.add_argument("--drafts", type=int, default=5)
    parser.add_argument("--tree", type=int, default=15, help="drafts of `tree`, no deeper than `--drafts`")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--model", type=Path, default=MODELS / "llama-3.1-8b", help="folder with a config.json")
    parser.add_argument("--ranks", type=int, default=1, help="--tensor-parallel-size; `synthetic` has one")
    parser.add_argument("--fixed", action="store_true", help="always draft, instead of as many as gain")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    if args.ranks > 1 and "synthetic" in args.ways:
        parser.error("synthetic drafts are those of a single process: give --ways plain model")

    accept_some(args.acceptance)
    accept_in_ranks(args.acceptance)
    report: dict[str, Any] = {**describe(), "device": torch.cuda.get_device_name(), "model": args.model.name}
    report |= {"ranks": args.ranks, "acceptance": args.acceptance, "ways": {}}
    for way in args.ways:
        drafts = tree_of(args.tree, args.acceptance, args.drafts) if way == "tree" else args.drafts
        loop = engine(way, args.model, args.ranks, drafts, max(args.streams), adaptive=not args.fixed)
        found = report["ways"][way] = {}
        for streams in args.streams:
            for _ in range(2):
                found[streams] = measure(loop, streams, args.tokens, drafts=way != "plain")
            if "plain" in report["ways"]:
                found[streams]["times"] = round(found[streams]["tok_s"] / report["ways"]["plain"][streams]["tok_s"], 3)
            print(way, streams, json.dumps(found[streams]), flush=True)
        loop.close()
        del loop
        gc.collect()
        torch.cuda.empty_cache()
    if args.output:
        args.output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
