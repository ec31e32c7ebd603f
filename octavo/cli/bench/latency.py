"""`octavo bench latency`: the duration of one batch, repeatedly, in this process."""

from __future__ import annotations

import random
import statistics
import time
from pathlib import Path
from typing import Any

from octavo.bench.floor import floor_seconds, share_text
from octavo.bench.report import check_place, percentile, save
from octavo.cli.bench.offline import ceilings_of, fixed_length, open_llm
from octavo.cli.flags import units
from octavo.cli.flags.args import add_engine_settings
from octavo.cli.flags.parser import OctavoParser
from octavo.core.terminal import say

PERCENTILES = (10, 25, 50, 75, 90, 99)


def run(argv: list[str]) -> int:
    parser = make_parser()
    args = parser.parse_args(argv)
    check_place(args.output_json, "--output-json")
    with open_llm(parser, args) as llm:
        rng = random.Random(vars(args).get("model.seed", 0))
        vocabulary = llm.info.vocab_size
        params = fixed_length(args.output_len)
        say(f"{args.batch_size} x ({args.input_len} in, {args.output_len} out), {llm.info.dtype} on {llm.info.device}")

        def once() -> float:
            # New tokens each time, otherwise the prefix cache would skip the prompt.
            prompts: list[Any] = [
                [rng.randrange(vocabulary) for _ in range(args.input_len)] for _ in range(args.batch_size)
            ]
            start = time.perf_counter()
            llm.generate(prompts, params, use_tqdm=False)
            return time.perf_counter() - start

        for _ in range(args.num_iters_warmup):
            once()
        latencies = [once() for _ in range(args.num_iters)]
        info = llm.info
    ceilings = ceilings_of(info)
    least = floor_seconds([(args.input_len, args.output_len)] * args.batch_size, info, ceilings)
    print(f"Avg latency: {statistics.fmean(latencies):.4f} seconds")
    for percent in PERCENTILES:
        print(f"{percent}% percentile latency: {percentile(latencies, percent):.4f} seconds")
    share = least / statistics.median(latencies)
    print(f"This machine at best:  {ceilings.text()}")
    print(f"Least time by that:  {least:.4f} seconds, {share_text(share)}")
    if args.output_json:
        figures = {
            "ceilings": ceilings.figures(),
            "floor_seconds": least,
            "fraction_of_floor": share,
            "avg_latency": statistics.fmean(latencies),
            "latencies": latencies,
            "percentiles": {str(percent): percentile(latencies, percent) for percent in PERCENTILES},
        }
        save(figures, args.output_json)
    return 0


def make_parser() -> OctavoParser:
    parser = OctavoParser(
        "octavo bench latency",
        words="[MODEL]",
        description="Time one batch from prompt to last token. Greedy, end-of-sequence ignored.",
    )
    group = parser.add_argument_group("batch")
    group.add_argument("--input-len", type=units.count, default=32, metavar="N", help="prompt tokens (default: 32)")
    group.add_argument("--output-len", type=units.count, default=128, metavar="N", help="(default: 128)")
    group.add_argument("--batch-size", type=units.count, default=8, metavar="N", help="requests (default: 8)")
    group.add_argument("--num-iters-warmup", type=units.natural, default=3, metavar="N", help="(default: 3)")
    group.add_argument("--num-iters", type=units.count, default=10, metavar="N", help="timed runs (default: 10)")
    group.add_argument("--output-json", type=Path, metavar="FILE", help="write the figures there")
    add_engine_settings(parser)
    return parser
