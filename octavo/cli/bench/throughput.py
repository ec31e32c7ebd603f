"""`octavo bench throughput`: all requests submitted at once, in this process."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from octavo.bench.floor import Ceilings, floor_seconds, share_text
from octavo.bench.report import check_place, save
from octavo.cli.bench.data import add_data_flags, make_samples
from octavo.cli.bench.offline import ceilings_of, fixed_length, open_llm
from octavo.cli.flags.args import add_engine_settings
from octavo.cli.flags.parser import OctavoParser
from octavo.core.info import ModelInfo
from octavo.core.output import RequestOutput
from octavo.core.stats import EngineStats
from octavo.core.terminal import say


def run(argv: list[str]) -> int:
    parser = make_parser()
    args = parser.parse_args(argv)
    check_place(args.output_json, "--output-json")
    with open_llm(parser, args) as llm:
        samples = make_samples(
            args,
            tokenizer=llm.get_tokenizer(),
            vocab_size=llm.info.vocab_size,
            as_text=False,
            seed=vars(args).get("model.seed", 0),
        )
        prompts: list[Any] = [s.prompt if isinstance(s.prompt, str) else list(s.prompt) for s in samples]
        say(f"{len(samples)} requests to {llm.info.name}, {llm.info.dtype} on {llm.info.device}")
        start = time.perf_counter()
        outputs = llm.generate(prompts, [fixed_length(s.output_tokens) for s in samples], use_tqdm=False)
        seconds = time.perf_counter() - start
        stats, info = llm.stats(), llm.info
    ceilings = ceilings_of(info)
    figures = _figures(outputs, seconds, stats, info, ceilings)
    print(_text(figures, ceilings))
    if args.output_json:
        save(figures, args.output_json)
    return 0


def _figures(
    outputs: Sequence[RequestOutput], seconds: float, stats: EngineStats, info: ModelInfo, ceilings: Ceilings
) -> dict[str, Any]:
    lengths = [(len(output.prompt_token_ids), len(output.outputs[0].token_ids)) for output in outputs]
    tokens_in = sum(len(output.prompt_token_ids) for output in outputs)
    tokens_out = sum(len(choice.token_ids) for output in outputs for choice in output.outputs)
    least = floor_seconds(lengths, info, ceilings)
    return {
        "elapsed_time": seconds,
        "num_requests": len(outputs),
        "total_input_tokens": tokens_in,
        "total_output_tokens": tokens_out,
        "requests_per_second": len(outputs) / seconds,
        "output_tokens_per_second": tokens_out / seconds,
        "tokens_per_second": (tokens_in + tokens_out) / seconds,
        "kv_waste": stats.mean_waste,
        "ceilings": ceilings.figures(),
        "floor_seconds": least,
        "fraction_of_floor": least / seconds,
        "exposed_host_seconds": stats.idle_s,
        "steps": stats.num_steps,
        "startup_seconds": info.phases,
    }


def _text(figures: Mapping[str, Any], ceilings: Ceilings) -> str:
    return (
        f"Throughput: {figures['requests_per_second']:.2f} requests/s, "
        f"{figures['tokens_per_second']:.2f} total tokens/s, "
        f"{figures['output_tokens_per_second']:.2f} output tokens/s\n"
        f"Total num prompt tokens:  {figures['total_input_tokens']}\n"
        f"Total num output tokens:  {figures['total_output_tokens']}\n"
        f"Duration (s):  {figures['elapsed_time']:.2f}\n"
        f"KV slots allocated but empty:  {figures['kv_waste']:.2%}\n"
        f"This machine at best:  {ceilings.text()}\n"
        f"Least time by that (s):  {figures['floor_seconds']:.2f}, "
        f"{share_text(figures['fraction_of_floor'])}"
    )


def make_parser() -> OctavoParser:
    parser = OctavoParser(
        "octavo bench throughput",
        words="[MODEL]",
        description="Submit all requests at once and time the total. Greedy, end-of-sequence ignored.",
    )
    add_data_flags(parser, num_prompts=100)
    parser.add_argument("--output-json", type=Path, metavar="FILE", help="write the figures there")
    add_engine_settings(parser)
    return parser
