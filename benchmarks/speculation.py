"""Tokens a second with and without drafts, greedily, on texts to edit and to summarise (data/edits.json).

    python benchmarks/speculation.py [MODEL] [--config '{"method": "auto"}'] [--tokens 160] [--batch 1] [--chat]
        [--settings {}] [--cpu-time] [--rounds 1] [--output FILE]

Two engines take turns at each prompt, so that other load on the machine affects both alike. Their answers must be
equal. Prompts are in the prefix cache when the clock starts. For a machine that is busy otherwise, `--cpu-time` counts
seconds of the processor with one thread, and `--rounds` takes the shortest of several times of each prompt.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from machine import describe

from octavo import LLM, SamplingParams

DATA = Path(__file__).parent / "data" / "edits.json"
CHAT = (
    "Why is the sky blue?",
    "Give me three ideas for a birthday present for a gardener.",
    "What is the difference between a virus and a bacterium?",
    "Write a short poem about the sea.",
    "How do I boil an egg?",
    "Tell me about the history of Rome.",
)


def prompts(*, chat: bool) -> list[list[dict[str, str]]]:
    if chat:
        return [[{"role": "user", "content": one}] for one in CHAT]
    tasks = json.loads(DATA.read_text(encoding="utf-8"))
    return [[{"role": "user", "content": f"{one['ask']}\n\n{one['text']}"}] for one in tasks]


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare an engine that drafts with one that does not.")
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--config", type=json.loads, default={"method": "auto"})
    parser.add_argument("--tokens", type=int, default=160)
    parser.add_argument("--batch", type=int, default=1, help="copies of each prompt at once")
    parser.add_argument("--chat", action="store_true", help="ordinary questions in place of texts to edit")
    parser.add_argument("--settings", type=json.loads, default={}, help="of both engines, as keywords of LLM")
    parser.add_argument("--cpu-time", action="store_true", help="one thread, and its time on the processor")
    parser.add_argument(
        "--rounds", type=int, default=1, help="answers to each prompt; the shortest time of each counts"
    )
    parser.add_argument("--output", type=Path, help="a file of JSON to add the result to")
    args = parser.parse_args()
    machine = describe()

    settings: dict[str, Any] = {"model": args.model, "max_model_len": 1024, "async_scheduling": False, **args.settings}
    if args.cpu_time:
        settings["threads"] = 1
    clock = time.process_time if args.cpu_time else time.perf_counter
    engines = [LLM(**settings, spec_method="none"), LLM(**settings, speculative_config=args.config)]
    params = SamplingParams(max_tokens=args.tokens, temperature=0)
    warm = [[{"role": "user", "content": "Say a, a, a, a, a, a, a, a."}]]
    for engine in engines:
        engine.chat(warm * args.batch, SamplingParams(max_tokens=32, temperature=0, ignore_eos=True), use_tqdm=False)
    spent, made = [0.0, 0.0], 0
    rows: list[dict[str, Any]] = []
    for number, messages in enumerate(prompts(chat=args.chat)):
        answers: list[Any] = [None, None]
        times: list[list[float]] = [[], []]
        for turn in range(number, number + args.rounds):
            for which in (0, 1) if turn % 2 else (1, 0):
                engines[which].chat([messages], SamplingParams(max_tokens=1, temperature=0), use_tqdm=False)
                began = clock()
                answers[which] = engines[which].chat([messages] * args.batch, params, use_tqdm=False)
                times[which].append(clock() - began)
        took = [min(one) for one in times]
        tokens = [[one.outputs[0].token_ids for one in answer] for answer in answers]
        assert tokens[0] == tokens[1], f"prompt {number}: the answers differ"
        count = sum(len(one) for one in tokens[0])
        made += count
        spent = [total + one for total, one in zip(spent, took, strict=True)]
        drafts = answers[1][0].outputs[0].drafts
        seconds = [round(one, 4) for one in took]
        rows.append({"tokens": count, "seconds": seconds, "accepted": drafts.accepted, "rejected": drafts.rejected})
        print(
            f"{number:2} {count:5} tokens  {count / took[0]:7.1f} -> {count / took[1]:7.1f} tokens/s"
            f"  x{took[0] / took[1]:.2f}  accepted {drafts.accepted}, rejected {drafts.rejected}",
            flush=True,
        )
    gain = spent[0] / spent[1]
    print(f"all {made:4} tokens  {made / spent[0]:7.1f} -> {made / spent[1]:7.1f} tokens/s  x{gain:.2f}")
    if args.output is not None:
        result = {"benchmark": "speculation", **machine, "gain": round(gain, 3), "prompts": rows}
        known = json.loads(args.output.read_text(encoding="utf-8")) if args.output.exists() else []
        args.output.write_text(json.dumps([*known, result], indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
