"""The flags for a benchmark's requests, and the samples made from them."""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from pathlib import Path

from octavo.bench.samples import PromptSource, Sample, TextTokens, custom, prefix_repetition, random_samples, sharegpt
from octavo.bench.traces import Arrival, read_trace, samples_of
from octavo.bench.workloads import WORKLOADS, workload
from octavo.cli.flags import units
from octavo.cli.flags.parser import OctavoParser
from octavo.core.errors import ConfigError

TIMED = "timed_trace"
NAMES = ("random", "sharegpt", "prefix_repetition", "custom", TIMED, *WORKLOADS)
_FILES = ("sharegpt", "custom", TIMED)


def add_data_flags(parser: OctavoParser, *, num_prompts: int) -> None:
    group = parser.add_argument_group("requests")
    add = group.add_argument
    add(
        "--dataset-name",
        choices=NAMES,
        default="random",
        help="what to send: random tokens, a data set, or one of the fixed workloads (default: random)",
    )
    add(
        "--dataset-path",
        type=Path,
        metavar="FILE",
        help=f"ShareGPT JSON; for custom, lines of JSON; for {TIMED}, what octavo serve --record-traffic wrote",
    )
    add(
        "--num-prompts",
        type=units.count,
        metavar="N",
        help=f"requests (default: {num_prompts}; for {TIMED}, all of the trace)",
    )
    parser.set_defaults(usual_prompts=num_prompts)
    add("--random-input-len", "--input-len", type=units.count, default=1024, metavar="N", help="(default: 1024)")
    add(
        "--random-output-len",
        "--output-len",
        type=units.count,
        metavar="N",
        help="tokens to generate (default: 128; for data sets, those of the data set's answers)",
    )
    add(
        "--random-range-ratio", type=float, default=0.0, metavar="R", help="fraction by which lengths vary (default: 0)"
    )
    add("--random-prefix-len", type=units.natural, default=0, metavar="N", help="common random prefix (default: 0)")
    add("--prefix-repetition-num-prefixes", type=units.count, default=10, metavar="N", help="(default: 10)")
    add("--prefix-repetition-prefix-len", type=units.count, default=256, metavar="N", help="(default: 256)")
    add("--prefix-repetition-suffix-len", type=units.count, default=256, metavar="N", help="(default: 256)")
    add("--prefix-repetition-output-len", type=units.count, default=128, metavar="N", help="(default: 128)")
    add(
        "--sharegpt-output-len",
        type=units.count,
        metavar="N",
        help="output length, instead of that of the data set's answers",
    )
    add(
        "--custom-output-len", type=units.count, metavar="N", help="output length, instead of each line's output_tokens"
    )
    add(
        "--trace-speed",
        type=units.positive,
        default=1.0,
        metavar="X",
        help=f"requests of {TIMED} arrive X times as fast (default: 1)",
    )
    add(
        "--scale",
        type=float,
        default=1.0,
        metavar="X",
        help="fraction of a fixed workload's requests to send (default: 1)",
    )


def arrivals_of(args: argparse.Namespace) -> list[Arrival]:
    """Return the requests of the trace that the flags name; empty if they name none.

    Raises:
        ConfigError: the trace is missing or unreadable, or `--trace-speed` has no trace.
    """
    if args.dataset_name != TIMED:
        if args.trace_speed != 1:
            raise ConfigError(f"--trace-speed {args.trace_speed:g} is for --dataset-name {TIMED}; add it.")
        return []
    if args.dataset_path is None:
        raise ConfigError(f"--dataset-name {TIMED} needs --dataset-path FILE")
    return read_trace(args.dataset_path, speed=args.trace_speed, most=args.num_prompts)


def make_samples(
    args: argparse.Namespace,
    *,
    tokenizer: TextTokens | None,
    vocab_size: int,
    as_text: bool,
    seed: int,
    arrivals: Sequence[Arrival] = (),
) -> list[Sample]:
    """Return the requests that the flags describe.

    Args:
        arrivals: those of the trace, from `arrivals_of`.

    Raises:
        ConfigError: a data set is missing or unreadable, or a flag does not apply to it.
    """
    if args.dataset_path is not None and args.dataset_name not in _FILES:
        raise ConfigError(f"--dataset-path is read with --dataset-name {' or '.join(_FILES)}; add one of them.")
    source = PromptSource(random.Random(seed), tokenizer, as_text=as_text)
    if args.dataset_name == TIMED:
        return samples_of(arrivals or arrivals_of(args), source)
    name, count, output_len = args.dataset_name, args.num_prompts or args.usual_prompts, args.random_output_len
    if name in WORKLOADS:
        works = workload(name, seed=seed, vocab_size=vocab_size, scale=args.scale)
        return [Sample(source.prompt(w.prompt), len(w.prompt), output_len or w.output_tokens) for w in works]
    if name == "random":
        if not 0 <= args.random_range_ratio < 1:
            raise ConfigError(f"--random-range-ratio must be in [0, 1), got {args.random_range_ratio}")
        return random_samples(
            source,
            count,
            input_len=args.random_input_len,
            output_len=output_len or 128,
            range_ratio=args.random_range_ratio,
            prefix_len=args.random_prefix_len,
        )
    if name == "prefix_repetition":
        return prefix_repetition(
            source,
            count,
            num_prefixes=args.prefix_repetition_num_prefixes,
            prefix_len=args.prefix_repetition_prefix_len,
            suffix_len=args.prefix_repetition_suffix_len,
            output_len=args.prefix_repetition_output_len,
        )
    if args.dataset_path is None:
        raise ConfigError(f"--dataset-name {name} needs --dataset-path FILE")
    if name == "sharegpt":
        return sharegpt(source, count, args.dataset_path, output_len=args.sharegpt_output_len or output_len)
    return custom(source, count, args.dataset_path, output_len=args.custom_output_len or output_len)
