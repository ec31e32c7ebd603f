"""Conversations that take turns, more than the device's KV cache holds: with KV blocks kept in the host's memory, and
without.

    python benchmarks/host_cache.py [MODEL] [--talks 12] [--turns 3] [--prompt 600] [--cache 96MiB] [--size 1]
        [--restart] [--settings {}] [--output FILE]

Conversations take turns in order. A turn's prompt begins with all turns before it; its time to first token is measured.
Both engines run in alternation. Equal answers are counted: on a GPU, rounding depends on how a prompt is cut into
steps. Prompts are random tokens, decoding is greedy. With `--restart`, blocks are kept in files instead, and both
engines are closed and started again before each turn.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from machine import describe

from octavo import LLM, SamplingParams


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--talks", type=int, default=12)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--prompt", type=int, default=600, help="tokens of the first turn; others add 50")
    parser.add_argument("--tokens", type=int, default=32, help="of an answer")
    parser.add_argument("--cache", default="96MiB", help="the device's KV cache")
    parser.add_argument("--size", type=float, default=1, help="GiB of the host's memory")
    parser.add_argument("--restart", action="store_true", help="start engines again before each turn")
    parser.add_argument("--settings", type=json.loads, default={}, help="of both engines, as keywords of LLM")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    report = describe()
    given: dict[str, Any] = {"kv_cache_memory_bytes": args.cache, "max_model_len": 1024, "spec_method": "none"}
    given |= args.settings
    keeping: dict[str, Any] = {"kv_offloading_size": args.size}
    folder = tempfile.TemporaryDirectory()
    if args.restart:
        keeping["kv_offloading_path"] = folder.name
    settings = {"without": given, "with": given | keeping}
    engines: dict[str, LLM] = {}
    answers: dict[str, list[list[int]]] = {name: [] for name in settings}
    first: dict[str, list[list[float]]] = {name: [] for name in settings}
    for turn in range(args.turns):
        if args.restart or not turn:
            for engine in engines.values():
                engine.close()
            engines = {name: LLM(args.model, **some) for name, some in settings.items()}
        for name, engine in engines.items():
            found = [ask(engine, talk, args.tokens) for talk in talks(args, turn, answers[name])]
            first[name].append([seconds for seconds, _ in found])
            answers[name] += [tokens for _, tokens in found]
            print(turn, name, f"{statistics.median(first[name][-1]) * 1e3:.1f} ms to the first token", flush=True)
    pairs = list(zip(answers["with"], answers["without"], strict=True))
    report["equal_answers"] = f"{sum(one == other for one, other in pairs)} of {len(pairs)}"
    report["first_token_ms"] = {
        name: [round(statistics.median(turn) * 1e3, 1) for turn in turns] for name, turns in first.items()
    }
    stats = engines["with"].stats()
    report["blocks"] = {"stored": stats.blocks_stored, "loaded": stats.blocks_loaded, "lost": stats.blocks_not_stored}
    print(json.dumps(report["first_token_ms"]), json.dumps(report["blocks"]), report["equal_answers"], "answers equal")
    if args.output:
        args.output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def talks(args: argparse.Namespace, turn: int, answers: list[list[int]]) -> list[list[int]]:
    """Return the prompts of a turn."""
    made = []
    for talk in range(args.talks):
        rng = random.Random(talk)
        prompt = [rng.randrange(1000, 40_000) for _ in range(args.prompt)]
        for earlier in range(turn):
            prompt += answers[earlier * args.talks + talk] + [rng.randrange(1000, 40_000) for _ in range(50)]
        made.append(prompt)
    return made


def ask(engine: LLM, prompt: list[int], tokens: int) -> tuple[float, list[int]]:
    """Return the seconds to the first token, and the answer."""
    params = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True, detokenize=False)
    one = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True, detokenize=False)
    began = time.perf_counter()
    engine.generate({"prompt_token_ids": prompt}, one, use_tqdm=False)
    seconds = time.perf_counter() - began
    found = engine.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)[0].outputs[0].token_ids
    return seconds, [*found]


if __name__ == "__main__":
    main()
