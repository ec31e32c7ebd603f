"""Sums over ranks in recorded graphs, with and without the norm that follows, by each way; and the floor of the link.

    python benchmarks/parallel_sums.py [--ranks 2] [--one-gpu] [--output FILE]

Microseconds of an operation, from graphs that repeat it 20 times: the median of ten replays on the slowest rank.
`--one-gpu` has all ranks share a GPU, which shows that it works, not how fast it is. Under `link`: an exchange of a few
words, which is the floor of any sum here, and the smallest launch.

Under `beside`: a product of 4,096 rows and, beside it, the sum of 32 MiB with its norm, as in steps in two parts;
launched 20 times without a graph. `product, norm` has no sum; `stored after` is one that nothing hides. Copies are left
out where their room is too small.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import os
import queue
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing
from machine import describe, describe_gpu
from torch import Tensor

from octavo.core.worker_info import RankPlace
from octavo.device.visible import environment_of
from octavo.parallel.join import LOCAL, MeetingPoint, join
from octavo.parallel.peers import Limits, PeerCollectives

HIDDEN = 8192
ROWS = (1, 4, 16, 64, 128, 256, 1024, 4096, 8192)
"""Of 16 KiB in bfloat16: the first is what a model of 70 billion parameters sums for one token."""
REPEATS = 20
BESIDE = (4096, 4096, 14336)
"""Rows, outputs and inputs of a product: the largest of Llama 3.1 8B on one device."""
ONE_SHOT, TWO_SHOTS = Limits(1 << 60, 1 << 60), Limits(0, 1 << 60)
STORED, NCCL = Limits(0, 0, 0, 1 << 60), Limits(0, 0)
_PATIENCE_S = 90.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--one-gpu", action="store_true")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    if args.one_gpu:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join("0" * args.ranks)
    report = {"machine": describe(), "gpu": describe_gpu(), **measure_sums(args.ranks)}
    print(json.dumps(report, indent=1))
    if args.output:
        args.output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def measure_sums(ranks: int, *, trial: bool = False) -> dict[str, Any]:
    """Return microseconds by way and KiB, of the slowest rank.

    Args:
        trial: on the CPU through gloo, to see that it works.
    """
    with MeetingPoint() as point:
        context = torch.multiprocessing.get_context("spawn")
        found: Any = context.Queue()
        processes = []
        for rank in range(ranks):
            place = RankPlace(rank, ranks, LOCAL, point.port)
            own = {} if trial else environment_of(rank, ranks)
            processes.append(context.Process(target=run_rank, args=(place, own, trial, found), daemon=True))
            processes[-1].start()
        try:
            each = results_of(processes, found)
        finally:
            for process in processes:
                process.kill()
    return functools.reduce(slower, each)


def results_of(processes: list[Any], found: Any) -> list[Any]:
    """Return what each rank puts into the queue; exit as soon as one has failed."""
    each: list[Any] = []
    ends = time.monotonic() + _PATIENCE_S
    while len(each) < len(processes):
        try:
            each.append(found.get(timeout=1))
        except queue.Empty:
            if any(process.exitcode for process in processes) or time.monotonic() > ends:
                raise SystemExit(f"a rank failed, or gave no result within {_PATIENCE_S:.0f} s") from None
    return each


def slower(one: Any, other: Any) -> Any:
    """Return the larger of two numbers, at each place of two dictionaries."""
    if isinstance(one, dict):
        return {name: slower(one[name], other[name]) for name in one}
    return max(one, other) if isinstance(one, int | float) else one


def run_rank(place: RankPlace, environment: dict[str, str], trial: bool, found: Any) -> None:
    os.environ |= environment
    if trial:
        torch.set_num_threads(1)
    mesh, _ = join(place, "cpu" if trial else "cuda", later=True)
    group = mesh.group
    result: dict[str, Any] = {"ranks": place.size, "us": {}}
    device = torch.device("cpu" if trial else "cuda")
    ways: dict[str, Limits | None] = {"NCCL": None}
    if isinstance(group, PeerCollectives):
        result["chosen_bytes"] = dataclasses.asdict(group.limits)
        ways = {"one shot": ONE_SHOT, "two shots": TWO_SHOTS, "stored": STORED}
        ways |= {} if group._others is None else {"NCCL": NCCL}
        result["link"] = link_floor(group, place)
    timed = timed_on_cpu if trial else timed_in_graph
    for rows in ROWS[:2] if trial else ROWS:
        x = torch.randn(rows, HIDDEN, device=device).bfloat16()
        stream, weight = torch.zeros_like(x), torch.ones(HIDDEN, device=device, dtype=torch.bfloat16)
        for name, limits in ways.items():
            if limits is not None and isinstance(group, PeerCollectives):
                group.limits = limits
            key = f"{rows * HIDDEN * 2 >> 10} KiB"
            result["us"].setdefault(key, {})[name] = timed(lambda x=x: mesh.all_reduce(x))
            result["us"][key][f"{name}, norm"] = timed(lambda x=x, s=stream, w=weight: sum_norm(mesh, x, s, w))
    if isinstance(group, PeerCollectives):
        result["beside"] = sums_beside(group)
    found.put(result)
    found.close()
    found.join_thread()
    torch.distributed.barrier()


def sum_norm(mesh: Any, x: Tensor, stream: Tensor, weight: Tensor) -> Tensor:
    """What follows a block's last product: the sum, the residual addition, the norm."""
    from octavo.nn.ops.norm import add_rms_norm

    later = mesh.sum_later(x)
    if later is None:
        return add_rms_norm(mesh.all_reduce(x), stream, weight, 1e-5)[0]
    return later.normed_with(stream, (weight, 1e-5), torch.bfloat16)


def sums_beside(group: PeerCollectives) -> dict[str, float]:
    """Return the microseconds of a product with a sum and its norm, by the way of the sum."""
    from octavo.nn.ops.norm import add_rms_norm, sum_rms_norm

    rows, width, inputs = BESIDE
    rest, copies = group._others, group.copies
    x, stream, out = (torch.zeros(rows, width, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    given, matrix = (torch.randn(size, inputs, device="cuda").bfloat16() for size in (rows, width))
    weight = torch.ones(width, device="cuda", dtype=torch.bfloat16)

    def multiply() -> None:
        torch.mm(given, matrix.t(), out=out)

    def norm() -> None:
        multiply()
        add_rms_norm(x, stream, weight, 1e-5)

    def stored() -> None:
        multiply()
        group.limits = STORED
        group.sum_norm(x, stream, (weight, 1e-5), torch.bfloat16)

    def nccl() -> None:
        begun = rest.begin_sum(x)
        multiply()
        sum_rms_norm(begun.total()[None], stream, weight, 1e-5)

    def copied() -> None:
        begun = copies.begin(x)
        multiply()
        begun.normed_with(stream, (weight, 1e-5), torch.bfloat16)

    def copied_alone() -> None:
        copies.begin(x).normed_with(stream, (weight, 1e-5), torch.bfloat16)

    ways = {"product": multiply, "product, norm": norm, "stored after": stored}
    ways |= {} if rest is None else {"NCCL beside": nccl}
    begun = None if copies is None else copies.begin(x)
    if begun is not None:  # None: more rows than there is room for
        begun.normed_with(stream, (weight, 1e-5), torch.bfloat16)
        ways |= {"copied beside": copied, "copied alone": copied_alone}
    return {name: timed_launches(way) for name, way in ways.items()}


def timed_launches(launch: Callable[[], object]) -> float:
    """Return the microseconds of a launch that is not recorded: the median of ten times twenty."""
    times = []
    for _ in range(12):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(REPEATS):
            launch()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / REPEATS)
    return round(statistics.median(times[2:]), 2)


def link_floor(group: PeerCollectives, place: RankPlace) -> dict[str, float]:
    """Return the microseconds of an exchange of the fewest words, where there is nothing else to do."""
    kept, group.limits = group.limits, ONE_SHOT
    x = torch.zeros(1, 2 * place.size, device="cuda")
    found = {"exchange_of_words_us": timed_in_graph(lambda: group.all_reduce(x))}
    one = torch.zeros(1, device="cuda")
    found["empty_launch_us"] = timed_in_graph(lambda: one.add_(1))
    group.limits = kept
    return found


def timed_in_graph(launch: Callable[[], object]) -> float:
    """Return the microseconds of a launch."""
    launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(REPEATS):
            launch()
    times = []
    for _ in range(12):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / REPEATS)
    return round(statistics.median(times[2:]), 2)


def timed_on_cpu(launch: Callable[[], object]) -> float:
    launch()
    return 0.0


if __name__ == "__main__":
    main()
