"""How Octavo's speed on a CPU grows with the batch, and shrinks with the context: no cliffs wanted.

    python benchmarks/cpu_scaling.py
    python benchmarks/cpu_scaling.py --formats int8 --repeats 5
    python benchmarks/cpu_scaling.py --batches --contexts 8192 --add          in pieces: the other points stay
    python benchmarks/cpu_scaling.py --plot-only          draws docs/cpu-scaling.svg again from the results

Three series for each format (greedy, end-of-sequence ignored, random prompts):
    batch     output tokens/s of 1 to 128 requests that decode together, each after 128 tokens
    context   output tokens/s of 1 and of 8 requests that decode together, each after 128 to 8,192 tokens
    prompt    input tokens/s of one prompt of 128 to 8,192 tokens

A decoding rate is the difference of two runs, of 33 tokens out and of 1, whose prompts lie in the prefix cache; the
least of some repeats of each. Drawing needs matplotlib (pip install "octavo[benchmark]").
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from machine import describe

HERE = Path(__file__).resolve().parent
FORMATS: dict[str, dict[str, str]] = {
    "bfloat16": {"dtype": "bfloat16"},
    "int16": {"activation_dtype": "int16"},
    "int8": {"activation_dtype": "int8"},
    "unpacked": {"activation_dtype": "bfloat16"},
}
BATCHES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
CONTEXTS = (128, 256, 512, 1024, 2048, 4096, 8192)
STEPS = 32
"""Decoding steps that are timed."""
LONGEST = 8192
SLACK = 0.9
"""A larger batch may have this share of a smaller one's tokens/s; a context twice as long, half as much of them."""

Series = dict[int, float]


class Meter:
    """Times one model."""

    def __init__(self, llm: Any, repeats: int, seed: int) -> None:
        self._llm = llm
        self._repeats = repeats
        self._rng = random.Random(seed)
        self._vocab = range(1000, llm.info.vocab_size - 1000)

    def decode(self, batch: int, context: int) -> float:
        """Output tokens/s of `batch` requests after `context` tokens each (the model's longest includes the output)."""
        length = min(context, LONGEST - STEPS - 1)
        prompts = [self._rng.choices(self._vocab, k=length) for _ in range(batch)]
        self._seconds(prompts, 1)  # the prompts are cached now
        pairs = [(self._seconds(prompts, STEPS + 1), self._seconds(prompts, 1)) for _ in range(self._repeats)]
        return round(batch * STEPS / (min(long for long, _ in pairs) - min(short for _, short in pairs)), 1)

    def prompt(self, length: int) -> float:
        """Input tokens/s of one prompt, new each time."""
        length = min(length, LONGEST - 1)
        times = [self._seconds([self._rng.choices(self._vocab, k=length)], 1) for _ in range(self._repeats)]
        return round(length / min(times), 1)

    def _seconds(self, prompts: list[list[int]], tokens: int) -> float:
        from octavo import SamplingParams

        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        started = time.perf_counter()
        self._llm.generate(prompts, params)
        return time.perf_counter() - started


def measure(meter: Meter, batches: Sequence[int], contexts: Sequence[int]) -> dict[str, Series]:
    series: dict[str, Series] = {"batch": {}, "context, 1 request": {}, "context, 8 requests": {}, "prompt": {}}
    for batch in batches:
        series["batch"][batch] = meter.decode(batch, 128)
        print("batch", batch, series["batch"][batch], flush=True)
    for context in contexts:
        series["context, 1 request"][context] = meter.decode(1, context)
        series["context, 8 requests"][context] = meter.decode(8, context)
        series["prompt"][context] = meter.prompt(context)
        print("context", context, {name: of[context] for name, of in series.items() if name != "batch"}, flush=True)
    return series


def cliffs(series: dict[str, Series]) -> list[str]:
    """Where speed breaks off: fewer tokens/s of a larger batch; more than the context's growth lost to a longer one."""
    found = []
    for name, of in series.items():
        for (low, before), (high, after) in itertools.pairwise(sorted(of.items())):
            least = SLACK * before * (1 if name == "batch" else low / high)
            if after < least:
                found.append(f"{name}: {before} tokens/s at {low}, {after} at {high}")
    return found


def draw(result: dict[str, Any], target: Path) -> None:
    """An SVG of three panels from a result as it was written."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot
    from matplotlib.ticker import FuncFormatter, NullLocator

    # Text as text, and the same bytes for the same figures.
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "octavo", "font.size": 9})
    figure, panels = pyplot.subplots(1, 3, figsize=(12, 3.8), layout="constrained")
    titles = ("Decoding together, 128 tokens of context", "Decoding after longer contexts", "One prompt")
    drawn = (("batch",), ("context, 1 request", "context, 8 requests"), ("prompt",))
    words = ("requests", "tokens of context", "tokens of the prompt")
    for panel, title, names, below in zip(panels, titles, drawn, words, strict=True):
        for number, (kind, series) in enumerate(result["series"].items()):
            for name, dashes in zip(names, ("-", "--"), strict=False):
                points = sorted((int(x), y) for x, y in series[name].items())
                label = kind if len(names) == 1 else f"{kind}{name.removeprefix('context')}"
                panel.plot(
                    *zip(*points, strict=True), dashes, color=f"C{number}", marker="o", markersize=3, label=label
                )
        panel.set_xscale("log", base=2)
        panel.set_xticks(sorted({int(x) for series in result["series"].values() for x in series[names[0]]}))
        panel.xaxis.set_minor_locator(NullLocator())
        panel.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:.0f}"))
        panel.tick_params(axis="x", labelrotation=60)
        panel.set_ylim(bottom=0)
        panel.set(title=title, xlabel=below)
        panel.grid(alpha=0.3)
        panel.legend(fontsize=7)
    panels[0].set_ylabel("output tokens/s")
    panels[1].set_ylabel("output tokens/s")
    panels[2].set_ylabel("input tokens/s")
    figure.savefig(target, metadata={"Date": None})
    print(f"drawn: {target}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=["bfloat16", "int8"])
    parser.add_argument("--batches", nargs="*", type=int, default=list(BATCHES))
    parser.add_argument("--contexts", nargs="*", type=int, default=list(CONTEXTS))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--add", action="store_true", help="keep what the output holds and this run does not measure")
    parser.add_argument("--plot-only", action="store_true")
    parser.add_argument("--output", type=Path, default=HERE / "results" / "cpu_scaling.json")
    parser.add_argument("--plot", type=Path, default=HERE.parent / "docs" / "cpu-scaling.svg")
    args = parser.parse_args()
    if args.plot_only:
        draw(json.loads(args.output.read_text(encoding="utf-8")), args.plot)
        return 0
    every = measured(args.output) if args.add else {}
    result: dict[str, Any] = {"benchmark": "cpu_scaling", **describe(), "threads": args.threads, "series": every}
    for kind in args.formats:
        print(kind, flush=True)
        known = every.setdefault(kind, {})
        for name, points in run(args, kind).items():
            known[name] = dict(sorted((known.get(name, {}) | points).items()))
    result["cliffs"] = {kind: cliffs(series) for kind, series in result["series"].items()}
    print(json.dumps(result["cliffs"], indent=1))
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(f"written to {args.output}")
    draw(json.loads(args.output.read_text(encoding="utf-8")), args.plot)
    return 1 if any(result["cliffs"].values()) else 0


def measured(path: Path) -> dict[str, dict[str, Series]]:
    """The series that were written; JSON had made words of their numbers."""
    series = json.loads(path.read_text(encoding="utf-8"))["series"]
    return {
        kind: {name: {int(at): rate for at, rate in points.items()} for name, points in of.items()}
        for kind, of in series.items()
    }


def run(args: argparse.Namespace, kind: str) -> dict[str, Series]:
    from octavo import LLM

    settings: dict[str, Any] = {**FORMATS[kind], "kv_cache_memory_bytes": 2 << 30, "spec_method": "none"}
    if args.threads:
        settings["threads"] = args.threads
    with LLM(args.model, **settings) as llm:
        return measure(Meter(llm, args.repeats, args.seed), args.batches, args.contexts)


if __name__ == "__main__":
    sys.exit(main())
