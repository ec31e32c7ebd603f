"""`octavo plan`: whether a model fits a GPU, for how many requests, and how fast it can be, before it is loaded."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from octavo.cli.flags.args import add_engine_settings, engine_config
from octavo.cli.flags.parser import OctavoParser
from octavo.cli.flags.table import ENGINE_GROUPS, flags_of
from octavo.cli.flags.units import show_bytes
from octavo.config import EngineConfig
from octavo.core.errors import ConfigError
from octavo.core.gpus import CONTEXT, GIB, GPUS, GRAPHS, Gpu, known_as
from octavo.core.quantities import size as read_size

if TYPE_CHECKING:
    from octavo.core.estimate import Estimate
    from octavo.hub.files import ModelFiles

ALL = "all"
_TAKEN = frozenset(
    (
        *("model", "revision", "download-dir", "hf-overrides", "rope-scaling", "rope-theta", "max-model-len"),
        *("dtype", "quantization", "kv-cache-dtype", "block-size", "gpu-memory-utilization", "cpu-offload-gb"),
        *("max-num-seqs", "max-num-batched-tokens", "tensor-parallel-size"),
    )
)
"""Flags of the engine that decide sizes."""
_RANKS = (1, 2, 4, 8)
_CONTEXTS = (1024, 4096, 16384, 65536, 131072)
_STREAMS = (1, 16, 64, 256)


def run(argv: list[str]) -> int:
    parser = make_parser()
    args = parser.parse_args(argv)
    config = engine_config(parser, args)
    from octavo.text.sources import model_files

    files = model_files(config.model, weights=False)
    word = args.gpu or _here()
    if word == ALL:
        found = [row for gpu in GPUS.values() if (row := _smallest(config, files, gpu)) is not None]
        if args.json:
            print(json.dumps([_as_dict(one) for one in found]))
        else:
            _print_all(files, found)
        return 0
    estimate = _estimate(config, files, _gpu(word))
    if args.json:
        print(json.dumps(_as_dict(estimate)))
    else:
        _print_one(config, files, estimate)
    return 0 if estimate.missing == 0 else 1


def make_parser() -> OctavoParser:
    parser = OctavoParser(
        "octavo plan",
        words="[MODEL]",
        description="Say whether a model fits a GPU, what its memory is for, how many requests it holds, and how fast "
        "they can be at most, from the model's configuration: no weights are read, and no GPU is needed. Takes those "
        "settings of octavo serve that decide sizes. The exit status is 1 if the model does not fit.",
    )
    parser.add_argument(
        "--gpu",
        metavar="GPU",
        help=f"one of {', '.join(GPUS)}; its memory, such as 24GiB; or {ALL} (default: the GPU of this machine, or "
        f"{ALL} where there is none)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON, with sizes in bytes")
    others = frozenset(flag.name for flag in flags_of(ENGINE_GROUPS)) - _TAKEN
    add_engine_settings(parser, without=others)
    return parser


def _here() -> str:
    """Return the word for the GPU of this machine, or `ALL`."""
    import torch

    if not torch.cuda.is_available():
        return ALL
    memory = torch.cuda.get_device_properties(0).total_memory
    known = known_as(torch.cuda.get_device_name(0))
    return next((word for word, gpu in GPUS.items() if gpu is known), str(memory))


def _gpu(word: str) -> Gpu:
    if (known := GPUS.get(word.lower())) is not None:
        return known
    try:
        memory = read_size(word)
    except ValueError:
        memory = 0
    if memory < GIB:
        raise ConfigError(
            f"--gpu {word} must be one of {', '.join(GPUS)}, {ALL}, or the size of a memory of at least 1GiB, such as "
            "24GiB."
        )
    return Gpu(show_bytes(memory), memory)


def _estimate(config: EngineConfig, files: ModelFiles, gpu: Gpu) -> Estimate:
    from octavo.worker.estimate import estimate_of

    return estimate_of(config, files, gpu)


def _smallest(config: EngineConfig, files: ModelFiles, gpu: Gpu) -> Estimate | None:
    """Return the estimate for as few GPUs as the model fits, at least as many as are set; None if there are none."""
    for ranks in _RANKS:
        if ranks < config.parallel.tensor_parallel_size:
            continue
        parallel = dataclasses.replace(config.parallel, tensor_parallel_size=ranks)
        try:
            found = _estimate(dataclasses.replace(config, parallel=parallel), files, gpu)
        except ConfigError:
            if ranks == config.parallel.tensor_parallel_size:
                raise
            return None  # the layers can't be divided so
        if not found.missing:
            return found
    return None


def _as_dict(estimate: Estimate) -> dict[str, Any]:
    parameters = estimate.parameters
    contexts = _contexts(estimate)
    return {
        "gpu": estimate.gpu.name,
        "gpus": estimate.ranks,
        "fits": estimate.missing == 0,
        "parameters": parameters.count,
        "active_parameters": parameters.active,
        "memory": {
            "gpu": estimate.gpu.memory,
            "weights": estimate.weights,
            "weights_in_host_memory": estimate.copied,
            "workspace": estimate.workspace,
            "graphs": GRAPHS,
            "context": CONTEXT,
            "kv_cache": estimate.cache,
            "missing": estimate.missing,
        },
        "weights": dict(parameters.parts),
        "kv_bytes_per_token": estimate.token_bytes,
        "longest_request": estimate.longest,
        "max_num_seqs": estimate.limits[0],
        "max_num_batched_tokens": estimate.limits[1],
        "requests": {str(context): estimate.at_once(context) for context in contexts},
        "output_tokens_per_second_at_most": {
            str(context): {str(streams): _rounded(rate) for streams, rate in _rates(estimate, context)}
            for context in contexts
        },
        "input_tokens_per_second_at_most": _rounded(estimate.prompt_rate()),
    }


def _rounded(rate: float | None) -> float | None:
    return None if rate is None else round(rate, 1)


def _contexts(estimate: Estimate) -> list[int]:
    return [context for context in _CONTEXTS if context <= estimate.longest] or [estimate.longest or 1]


def _rates(estimate: Estimate, context: int) -> list[tuple[int, float | None]]:
    return [
        (streams, estimate.decode_rate(streams, context))
        for streams in _STREAMS
        if streams <= estimate.at_once(context)
    ]


def _print_one(config: EngineConfig, files: ModelFiles, estimate: Estimate) -> None:
    gpu, (sequences, tokens) = estimate.gpu, estimate.limits
    rows = [
        (f"{estimate.ranks} x {gpu.name}", gpu.memory, f"each; {estimate.room / gpu.memory:.0%} of it are used"),
        ("weights", estimate.weights, ""),
        *((f"  {name}", size, "") for name, size in estimate.parameters.parts.items()),
        *([("  in the host's memory", estimate.copied, "copied by each step")] if estimate.copied else []),
        ("largest step", estimate.workspace, f"of {tokens:,} tokens and {sequences:,} sequences"),
        ("CUDA and its graphs", GRAPHS + CONTEXT, ""),
    ]
    if estimate.missing:
        rows.append(("missing", estimate.missing, f"for a request of {estimate.wanted:,} tokens"))
    else:
        each = show_bytes(estimate.token_bytes * sum(group.grows for group in estimate.groups))
        rows.append(("KV cache", estimate.cache, f"a token takes up to {each}"))
    print(_title(files, estimate))
    widest = max(len(label) for label, _, _ in rows)
    for label, size, about in rows:
        print(f"{label:{widest}}  {show_bytes(size):>10}  {about}".rstrip())
    print()
    if estimate.missing:
        print(f"It does not fit. {_remedy(config, files, estimate)}")
        return
    print(f"The longest request has {estimate.longest:,} tokens.")
    streams = [count for count in _STREAMS if gpu.bandwidth]
    table = [["context", "requests at once", *(f"tokens/s of {count}" for count in streams)]]
    for context in _contexts(estimate):
        rates = dict(_rates(estimate, context))
        shown = [_shown(rates.get(count)) for count in streams]
        table.append([f"{context:,}", f"{estimate.at_once(context):,}", *shown])
    _print_table(table)
    if streams:
        print(f"\nPrompts: {_shown(estimate.prompt_rate())} tokens/s. Rates are bounds, by the maker's figures.")


def _print_table(rows: Sequence[Sequence[str]]) -> None:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True)).rstrip())


def _shown(rate: float | None) -> str:
    return "" if rate is None else f"{rate:,.0f}"


def _title(files: ModelFiles, estimate: Estimate) -> str:
    parameters = estimate.parameters
    active = f" ({parameters.active / 1e9:.1f} used by a token)" if parameters.experts else ""
    name = (files.config.get("architectures") or ["?"])[0]
    return f"{files.name} ({name}): {parameters.count / 1e9:.2f} billion parameters{active}"


def _remedy(config: EngineConfig, files: ModelFiles, estimate: Estimate) -> str:
    """Return what would make it fit."""
    found = []
    smallest = _smallest(config, files, estimate.gpu)
    if smallest is not None:
        found.append(f"--tensor-parallel-size {smallest.ranks}")
    offloaded = -(-(estimate.missing + estimate.freed) // GIB)
    changes: list[tuple[str, str, dict[str, Any]]] = [
        ("--kv-cache-dtype {}", "cache", {"kv_cache_dtype": "fp8"}),
        ("--quantization {}", "model", {"quantization": "fp8"}),
        ("--quantization {}", "model", {"quantization": "w4a16"}),
    ]
    if offloaded * GIB <= estimate.parameters.total // 2:  # steps that copy more are too slow to be of use
        changes.insert(0, ("--cpu-offload-gb {}", "cache", {"cpu_offload_gb": float(offloaded)}))
    for name, section, change in changes:
        changed = dataclasses.replace(getattr(config, section), **change)
        try:
            fits = not _estimate(dataclasses.replace(config, **{section: changed}), files, estimate.gpu).missing
        except ConfigError:
            continue
        if fits:
            (value,) = change.values()
            found.append(name.format(f"{value:g}" if isinstance(value, float) else value))
    return f"It would with one of: {', '.join(found)}." if found else "Take a larger GPU, or a smaller model."


def _print_all(files: ModelFiles, found: Sequence[Estimate]) -> None:
    if not found:
        print(f"{files.name} fits none of {', '.join(GPUS)}, nor up to {_RANKS[-1]} of them.")
        return
    print(_title(files, found[0]))
    table = [["GPUs", "KV cache", "longest request", "requests of 4,096", "tokens/s of 1", "of 64"]]
    for one in found:
        rates = [one.decode_rate(count, 4096) if one.at_once(4096) >= count else None for count in (1, 64)]
        name = f"{one.ranks} x {one.gpu.name}"
        sizes = show_bytes(one.cache), f"{one.longest:,}", f"{one.at_once(4096):,}"
        table.append([f"{name:22}", *sizes, *map(_shown, rates)])
    _print_table(table)
    print("\nRates are bounds, by the makers' figures. --gpu NAME tells more of one.")
