"""`octavo plan`: whether a model fits GPUs, or this machine's memory, for how many requests, and how fast it can be."""

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
from octavo.device import host
from octavo.features import parts

if TYPE_CHECKING:
    from octavo.core.estimate import Estimate
    from octavo.device.cpu import CpuDevice
    from octavo.hub.files import ModelFiles

ALL = "all"
_TAKEN = frozenset(
    (
        *("model", "revision", "download-dir", "hf-overrides", "rope-scaling", "rope-theta", "max-model-len"),
        *("dtype", "quantization", "kv-cache-dtype", "block-size", "gpu-memory-utilization", "cpu-offload-gb"),
        *("max-num-seqs", "max-num-batched-tokens", "device", "tensor-parallel-size", "pipeline-parallel-size"),
        *("pipeline-layers", "prefill-context-parallel-size", "data-parallel-size", "enable-expert-parallel"),
        *("all2all-backend", "nnodes"),
    )
)
"""Flags of the engine that decide sizes, besides those of features."""
_RANKS = (1, 2, 4, 8)
_CONTEXTS = (1024, 4096, 16384, 65536, 131072)
_STREAMS = (1, 16, 64, 256)


def run(argv: list[str]) -> int:
    parser = make_parser()
    args = parser.parse_args(argv)
    config = engine_config(parser, args)
    from octavo.text.sources import model_files

    files = model_files(config.model, weights=False)
    host_free: int | None = None
    if config.device.device == "cpu":
        device: Gpu | CpuDevice = _cpu(args.gpu, args.memory)
    else:
        if args.memory is not None:
            raise ConfigError(f"--memory {args.memory} is for --device cpu. Set that, or --gpu {args.memory}.")
        word = args.gpu or _here()
        if word == ALL:
            found = [row for gpu in GPUS.values() if (row := _smallest(config, files, gpu)) is not None]
            if args.json:
                print(json.dumps([_as_dict(one) for one in found]))
            else:
                _print_all(files, found)
            return 0
        device = _gpu(word)
        host_free = None if args.gpu else host.available_memory()
    estimate = _estimate(config, files, device, host_free)
    if args.json:
        print(json.dumps(_as_dict(estimate)))
    else:
        _print_one(config, files, estimate, device)
    return 0 if estimate.fits else 1


def make_parser() -> OctavoParser:
    parser = OctavoParser(
        "octavo plan",
        words="[MODEL]",
        description="Say whether a model fits GPUs, or with --device cpu this machine's memory, what memory is for, "
        "how many requests it holds, and how fast they can be at most, from the model's configuration: no weights are "
        "loaded, and no GPU is needed. Takes those settings of octavo serve that decide sizes. The exit status is 1 if "
        "the model does not fit.",
    )
    parser.add_argument(
        "--gpu",
        metavar="GPU",
        help=f"one of {', '.join(GPUS)}; its memory, such as 24GiB; or {ALL} (default: the GPU of this machine, or "
        f"{ALL} where there is none)",
    )
    parser.add_argument(
        "--memory", metavar="SIZE", help="with --device cpu: free memory of the machine (default: that of this machine)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON, with sizes in bytes")
    taken = _TAKEN.union(*(module.FLAGS for _, module in parts("estimate")))
    others = frozenset(flag.name for flag in flags_of(ENGINE_GROUPS)) - taken
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


def _cpu(gpu: str | None, memory: str | None) -> CpuDevice:
    """Return the CPUs of this machine, with its free memory or another size of it."""
    from octavo.device.cpu import CpuDevice

    if gpu is not None:
        raise ConfigError(f"--gpu {gpu} has no effect with --device cpu. Leave one of them out.")
    device = CpuDevice()
    if memory is not None:
        try:
            device.available = read_size(memory)
        except ValueError as error:
            raise ConfigError(f"--memory {memory}: {error}.") from None
    return device


def _estimate(
    config: EngineConfig, files: ModelFiles, device: Gpu | CpuDevice, host_free: int | None = None
) -> Estimate:
    from octavo.build_plan import plan_of

    return plan_of(config, files, device, host_free)


def _smallest(config: EngineConfig, files: ModelFiles, gpu: Gpu) -> Estimate | None:
    """Return the estimate for as few GPUs as the model fits, at least as many as are set; None if there are none."""
    flag = _dividing(config)
    given = getattr(config.parallel, flag)
    for ranks in (given, *(count for count in _RANKS if count > given)):
        parallel = dataclasses.replace(config.parallel, **{flag: ranks})
        try:
            found = _estimate(dataclasses.replace(config, parallel=parallel), files, gpu)
        except ConfigError:
            if ranks == given:
                raise
            return None  # the layers can't be divided so
        if found.fits:
            return found
    return None


def _dividing(config: EngineConfig) -> str:
    """Return the setting that divides the model over more GPUs."""
    return "data_parallel_size" if config.parallel.divides_requests else "tensor_parallel_size"


def _as_dict(estimate: Estimate) -> dict[str, Any]:
    load, parameters = estimate.load, estimate.parameters
    contexts = _contexts(estimate)
    return {
        "gpu": estimate.gpu.name,
        "gpus": estimate.ranks,
        "stages": len(estimate.stages),
        "fullest_stage": estimate.fullest + 1,
        "fits": estimate.fits,
        "parameters": parameters.count,
        "active_parameters": parameters.active,
        "memory": {
            "gpu": estimate.gpu.memory,
            "weights": load.weights,
            "weights_in_host_memory": load.copied,
            "workspace": load.workspace,
            "graphs": 0 if load.on_cpu else GRAPHS,
            "context": 0 if load.on_cpu else CONTEXT,
            "kv_cache": load.cache,
            "missing": estimate.missing,
            "host_of_one_machine": estimate.in_host,
            "missing_in_host": estimate.missing_in_host,
        },
        "weights": {**load.parameters.parts, **load.besides},
        "kv_bytes_per_token": load.token_bytes,
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


def _rows(estimate: Estimate) -> list[tuple[str, int, str]]:
    """Return what the memory of the fullest device is for: a label, bytes, and a remark."""
    load, gpu, (sequences, tokens) = estimate.load, estimate.gpu, estimate.limits
    stage = f"stage {estimate.fullest + 1} of {len(estimate.stages)}" if len(estimate.stages) > 1 else ""
    share = f"{load.room / gpu.memory:.0%} of it are used"
    if load.on_cpu:
        of = "free" if estimate.neighbours == 1 else f"free, for each of {estimate.neighbours} ranks"
        first = (gpu.name, gpu.memory, f"{of}; weights and KV cache may take {load.room / gpu.memory:.0%}")
    else:
        first = (f"{estimate.ranks} x {gpu.name}", gpu.memory, f"each; {share}")
    rows = [
        first,
        ("weights", load.weights, stage and f"of {stage}, the fullest"),
        *((f"  {name}", size, "") for name, size in {**load.parameters.parts, **load.besides}.items()),
    ]
    if load.copied:
        each = f"copied by each step; {show_bytes(estimate.in_host)} for {estimate.neighbours} GPUs of a machine"
        rows.append(("  in the host's memory", load.copied, each if estimate.neighbours > 1 else "copied by each step"))
    rows.append(("largest step", load.workspace, f"of {tokens:,} tokens and {sequences:,} sequences"))
    if not load.on_cpu:
        rows.append(("CUDA and its graphs", GRAPHS + CONTEXT, ""))
    if estimate.missing:
        rows.append(("missing", estimate.missing, f"for a request of {estimate.wanted:,} tokens"))
    else:
        each = show_bytes(load.fit.block_bytes // load.block_size * sum(group.grows for group in load.groups))
        rows.append(("KV cache", load.cache, f"a token takes up to {each}"))
    if estimate.missing_in_host:
        rows.append(("missing in the host's memory", estimate.missing_in_host, ""))
    return rows


def _print_one(config: EngineConfig, files: ModelFiles, estimate: Estimate, device: Gpu | CpuDevice) -> None:
    gpu, rows = estimate.gpu, _rows(estimate)
    print(_title(files, estimate))
    widest = max(len(label) for label, _, _ in rows)
    for label, size, about in rows:
        print(f"{label:{widest}}  {show_bytes(size):>10}  {about}".rstrip())
    print()
    if not estimate.fits:
        print(f"It does not fit. {_remedy(config, files, estimate, device)}")
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
        drafts = " Drafts are not counted." if any("draft" in name for name in estimate.load.besides) else ""
        prompts = f"Prompts: {_shown(estimate.prompt_rate())} tokens/s."
        print(f"\n{prompts} Rates are bounds, by the maker's figures.{drafts}")


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


def _remedy(config: EngineConfig, files: ModelFiles, estimate: Estimate, device: Gpu | CpuDevice) -> str:
    """Return what would make it fit."""
    found = []
    if isinstance(device, Gpu) and (smallest := _smallest(config, files, device)) is not None:
        flag, load = _dividing(config), smallest.stages[0]
        count = load.cache_ranks if load.cache_ranks > 1 else load.ranks // len(smallest.stages)
        found.append(f"--{flag.replace('_', '-')} {count}")
    for name, section, change in _changes(estimate):
        changed = dataclasses.replace(getattr(config, section), **change)
        try:
            fits = _estimate(dataclasses.replace(config, **{section: changed}), files, device, estimate.host_free).fits
        except ConfigError:
            continue
        if fits:
            (value,) = change.values()
            found.append(name.format(f"{value:g}" if isinstance(value, float) else value))
    larger = "Free memory" if estimate.load.on_cpu else "Take a larger GPU"
    return f"It would with one of: {', '.join(found)}." if found else f"{larger}, or take a smaller model."


def _changes(estimate: Estimate) -> list[tuple[str, str, dict[str, Any]]]:
    """Return changes of settings that may make it fit: as flags, and as a section of the settings and its fields."""
    load = estimate.load
    if load.on_cpu:
        return [
            ("--gpu-memory-utilization {}", "cache", {"memory_utilization": 0.9}),
            ("--kv-cache-dtype {}", "cache", {"kv_cache_dtype": "int8"}),
            ("--dtype {}", "model", {"dtype": "bfloat16"}),
        ]
    changes: list[tuple[str, str, dict[str, Any]]] = [
        ("--kv-cache-dtype {}", "cache", {"kv_cache_dtype": "fp8"}),
        ("--quantization {}", "model", {"quantization": "fp8"}),
        ("--quantization {}", "model", {"quantization": "w4a16"}),
    ]
    offloaded = -(-(estimate.missing + load.freed) // GIB)
    if offloaded * GIB <= load.parameters.total // 2:  # steps that copy more are too slow to be of use
        changes.insert(0, ("--cpu-offload-gb {}", "cache", {"cpu_offload_gb": float(offloaded)}))
    return changes


def _print_all(files: ModelFiles, found: Sequence[Estimate]) -> None:
    if not found:
        print(f"{files.name} fits none of {', '.join(GPUS)}, nor up to {_RANKS[-1]} of them.")
        return
    print(_title(files, found[0]))
    table = [["GPUs", "KV cache", "longest request", "requests of 4,096", "tokens/s of 1", "of 64"]]
    for one in found:
        rates = [one.decode_rate(count, 4096) if one.at_once(4096) >= count else None for count in (1, 64)]
        name = f"{one.ranks} x {one.gpu.name}"
        sizes = show_bytes(one.load.cache), f"{one.longest:,}", f"{one.at_once(4096):,}"
        table.append([f"{name:22}", *sizes, *map(_shown, rates)])
    _print_table(table)
    print("\nRates are bounds, by the makers' figures. --gpu NAME tells more of one.")
