"""`octavo bench serve`: a running OpenAI-compatible server under load."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections import Counter
from datetime import datetime
from pathlib import Path
from typing import Any

from octavo.bench.client import Target
from octavo.bench.load import LoadPattern, first_model, profile, run_load, wait_ready
from octavo.bench.report import Summary, check_place, save
from octavo.bench.samples import Sample, TextTokens
from octavo.bench.timing import Timing
from octavo.cli.bench.data import TIMED, add_data_flags, arrivals_of, make_samples
from octavo.cli.bench.results import ReportedFigures, add_result_flags, parse_result_flags
from octavo.cli.flags import units
from octavo.cli.flags.parser import OctavoParser
from octavo.core.errors import ConfigError, OctavoError
from octavo.core.terminal import say

ENDPOINTS = {
    "openai": "/v1/completions",
    "vllm": "/v1/completions",
    "openai-chat": "/v1/chat/completions",
}
DEFAULT_VOCABULARY = 30_000
SHOWN_ERRORS = 5


def run(argv: list[str]) -> int:
    args = make_parser().parse_args(argv)
    return asyncio.run(bench(args))


def make_parser() -> OctavoParser:
    parser = OctavoParser("octavo bench serve", description="Load a running server and time every token.")
    server = parser.add_argument_group("server")
    server.add_argument("--backend", choices=tuple(ENDPOINTS), default="openai", help="protocol (default: openai)")
    server.add_argument("--base-url", metavar="URL", help="instead of --host and --port")
    server.add_argument("--host", default="127.0.0.1", help="(default: 127.0.0.1)")
    server.add_argument("--port", type=units.port, default=8000, help="(default: 8000)")
    server.add_argument("--endpoint", metavar="PATH", help="(default: the backend's)")
    server.add_argument("--header", nargs="+", default=[], metavar="NAME=VALUE", help="sent with every request")
    server.add_argument("--api-key", metavar="KEY", help="sent as a bearer token")
    server.add_argument("--model", metavar="NAME", help="model to request (default: the first that the server lists)")
    server.add_argument("--served-model-name", metavar="NAME", help="model name to request, if it is not --model")
    server.add_argument(
        "--tokenizer", metavar="MODEL", help="tokenizer that counts and makes prompts (default: --model's, if known)"
    )
    server.add_argument(
        "--ready-check-timeout-sec", type=units.seconds, default=60.0, metavar="S", help="(default: 60)"
    )
    add_data_flags(parser, num_prompts=1000)
    load = parser.add_argument_group("load")
    load.add_argument("--request-rate", type=float, default=float("inf"), metavar="R", help="per second (default: inf)")
    load.add_argument("--burstiness", type=float, default=1.0, metavar="B", help="1 is Poisson (default: 1)")
    load.add_argument("--max-concurrency", type=units.count, metavar="N", help="requests at once (default: no limit)")
    load.add_argument("--num-warmups", type=units.natural, default=0, metavar="N", help="not counted (default: 0)")
    load.add_argument("--profile", action="store_true", help="have the server make a profile (--profiler-config)")
    load.add_argument("--seed", type=int, default=0, help="of prompts and arrival times (default: 0)")
    add_request_flags(parser)
    result = add_result_flags(parser)
    result.add_argument("--save-result", action="store_true", help="write the figures as JSON")
    result.add_argument("--save-detailed", action="store_true", help="write every request's times too")
    result.add_argument("--result-dir", type=Path, default=Path(), metavar="DIR", help="(default: here)")
    result.add_argument("--result-filename", metavar="NAME", help="(default: from model, rate and date)")
    result.add_argument("--disable-tqdm", action="store_true", help="no progress bar")
    return parser


def add_request_flags(parser: OctavoParser) -> None:
    sampling = parser.add_argument_group("sampling")
    sampling.add_argument("--ignore-eos", action="store_true", help="always generate the requested number of tokens")
    sampling.add_argument("--temperature", type=float, default=0.0, help="(default: 0)")
    sampling.add_argument("--top-p", type=float)
    sampling.add_argument("--top-k", type=int)
    sampling.add_argument("--min-p", type=float)
    sampling.add_argument("--extra-body", type=json.loads, default={}, metavar="JSON", help="added to every request")


async def bench(args: argparse.Namespace) -> int:
    """Return the command's exit code: 0 if any request succeeded."""
    if not args.request_rate > 0 or not args.burstiness > 0:
        raise ConfigError("--request-rate and --burstiness must be greater than zero")
    if args.dataset_name == TIMED and (args.request_rate != float("inf") or args.burstiness != 1):
        raise ConfigError(
            f"--dataset-name {TIMED} has times of its own: leave --request-rate and --burstiness out, or make "
            "them come faster with --trace-speed."
        )
    wanted = parse_result_flags(args)
    if args.save_result or args.save_detailed:
        check_place(args.result_dir / (args.result_filename or "result.json"), "--result-dir")
    target = await find_target(args)
    arrivals = arrivals_of(args)
    tokenizer = find_tokenizer(args.tokenizer or args.model or target.model, required=bool(args.tokenizer))
    samples = make_samples(
        args,
        tokenizer=tokenizer,
        vocab_size=tokenizer.vocab_size if tokenizer else DEFAULT_VOCABULARY,
        as_text=target.chat,
        seed=args.seed,
        arrivals=arrivals,
    )
    pattern = LoadPattern(
        rate=args.request_rate,
        burstiness=args.burstiness,
        max_concurrency=args.max_concurrency,
        times=[arrival.at for arrival in arrivals],
    )
    pace = f"rate {pattern.rate:g}/s" if not arrivals else f"over {arrivals[-1].at:.1f} s"
    say(f"{len(samples)} requests to {target.base_url}{target.endpoint}, model {target.model}, {pace}")
    if args.num_warmups:
        await run_load(target, [samples[0]] * args.num_warmups, pattern)
    if args.profile:
        await profile(target.base_url, target.headers, "start")
    timings, duration = await run_with_bar(target, samples, pattern, seed=args.seed, show=not args.disable_tqdm)
    if args.profile:
        trace = (await profile(target.base_url, target.headers, "stop")).get("trace")
        say(f"the server wrote a profile to {trace}" if trace else "the server's profile has ended; its log says where")
    return report(args, wanted, target.model, timings, duration)


async def find_target(args: argparse.Namespace) -> Target:
    """Return the target of all requests, once the server responds."""
    base_url = (args.base_url or f"http://{args.host}:{args.port}").rstrip("/")
    headers = parse_headers(args)
    patience = args.ready_check_timeout_sec
    waiting = f"no server answers at %s yet; waiting for it for {patience:g} s (--ready-check-timeout-sec)"
    await wait_ready(base_url, patience, waiting=lambda url: say(waiting % url))
    return Target(
        base_url=base_url,
        endpoint=args.endpoint or ENDPOINTS[args.backend],
        model=args.served_model_name or args.model or await first_model(base_url, headers),
        body=request_body(args),
        headers=headers,
    )


def report(
    args: argparse.Namespace, wanted: ReportedFigures, model: str, timings: list[Timing], duration: float
) -> int:
    """Print the figures, and save them if requested. Return the command's exit code."""
    summary = Summary.of(timings, duration, wanted.goals)
    print(summary.text(wanted.metrics, wanted.percentiles))
    if args.save_result or args.save_detailed:
        figures = described(args, model, len(timings)) | summary.figures(wanted.metrics, wanted.percentiles)
        if args.save_detailed:
            figures |= details(timings)
        path = args.result_dir / (args.result_filename or f"{args.backend}-{args.request_rate:g}qps-{_stamp()}.json")
        save(figures, path)
        say(f"result saved as {path}")
    errors = Counter(t.error for t in timings if t.error)
    for error, count in errors.most_common(SHOWN_ERRORS):
        say(f"failed ({count} of {len(timings)}): {error}")
    return 0 if summary.completed else 1


async def run_with_bar(
    target: Target, samples: list[Sample], pattern: LoadPattern, *, seed: int, show: bool
) -> tuple[list[Timing], float]:
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True, disable=not (show and sys.stderr.isatty())) as progress:
        task = progress.add_task("requests", total=len(samples))
        return await run_load(target, samples, pattern, seed=seed, done=lambda: progress.advance(task))


def find_tokenizer(model: str, *, required: bool) -> TextTokens | None:
    """Return the model's tokenizer if its files are on this machine, else None.

    Raises:
        OctavoError: it is not, and `required` is set.
    """
    from octavo.hub.resolve import resolve
    from octavo.text.tokenizers.tokenizer import load_tokenizer

    try:
        return load_tokenizer(resolve(model, tokenizer_only=True, weights=False))
    except OctavoError:
        if required:
            raise
        say("no tokenizer at hand for this model: lengths of text prompts are estimates (give --tokenizer)")
        return None


def request_body(args: argparse.Namespace) -> dict[str, Any]:
    if not isinstance(args.extra_body, dict):
        raise ConfigError(f"--extra-body must be a JSON object, got {args.extra_body!r}")
    chosen = {"top_p": args.top_p, "top_k": args.top_k, "min_p": args.min_p}
    body = {"temperature": args.temperature, **{k: v for k, v in chosen.items() if v is not None}}
    return body | ({"ignore_eos": True} if args.ignore_eos else {}) | args.extra_body


def parse_headers(args: argparse.Namespace) -> dict[str, str]:
    headers = {}
    for item in args.header:
        name, equals, value = item.partition("=")
        if not equals:
            raise ConfigError(f"--header {item!r} must be NAME=VALUE")
        headers[name] = value
    if args.api_key:
        headers["Authorization"] = f"Bearer {args.api_key}"
    return headers


def described(args: argparse.Namespace, model: str, count: int) -> dict[str, Any]:
    return {
        "date": _stamp(),
        "backend": args.backend,
        "model_id": model,
        "dataset_name": args.dataset_name,
        "num_prompts": count,
        "request_rate": "inf" if args.request_rate == float("inf") else args.request_rate,
        "burstiness": args.burstiness,
        "max_concurrency": args.max_concurrency,
    }


def details(timings: list[Timing]) -> dict[str, Any]:
    return {
        "input_lens": [t.prompt_tokens for t in timings],
        "output_lens": [t.output_tokens for t in timings],
        "ttfts": [t.ttft if t.ok else None for t in timings],
        "itls": [t.gaps for t in timings],
        "errors": [t.error or "" for t in timings],
    }


def _stamp() -> str:
    return datetime.now().strftime("%Y%m%d-%H%M%S")
