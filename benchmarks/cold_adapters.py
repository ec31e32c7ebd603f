"""Time until adapters whose files are in the page cache can be used, in a worker of a server with a GPU.

    python benchmarks/cold_adapters.py [--ranks 16 64] [--repeat 10] [--dtype bfloat16|float32] [--device cpu|cuda]
        [--folder DIR] [--output figures.json]

The adapters change all linear layers of a model of the 8B shape (see adapter_reading.py). In ms, the median and the
least of `--repeat`, for each rank:

    floor          the file's bytes by `preadv` into memory in use, in one thread and in `--threads` threads
    fill           processor time of all pages, read by one thread into memory in use, and of its stages
    alone          from the call that reads an adapter until its last page is in blocks, looked at each millisecond, as
                   by an idle engine
    beside steps   the same between simulated steps of `STEP_S`, during whose first `PLANNING_S` a thread computes in
                   Python
    in a queue     adapters of `--queue` ranks begun at once beside steps: when each was there
    waits          loads beside steps, each of whose parts takes `PART_S` to read without a processor, so that only
                   waits for steps and for rooms count

Without a device (cpu), a copy to it ends after as long as `--bandwidth` says. With cuda, pages are copied to blocks of
a tensor there, as in an engine. `--fillers`, `--rooms` and `--room-mib` replace the worker's numbers.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import statistics
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import msgspec
import torch
from adapter_reading import BLOCK, HIDDEN, KEYS, LAYERS, no_gains, save, targets
from machine import Report, describe, describe_gpu

from octavo.core.output import TransferState
from octavo.core.plan import Transfer, Transfers
from octavo.device.transfer import HostCopier, Mark, link_of
from octavo.engine.process import keep_freed_memory, switch_threads_often
from octavo.features.lora import direct, worker
from octavo.features.lora.checks import Checker
from octavo.features.lora.payload import NAME, Reading, Source, page_names
from octavo.features.lora.reader import OpenAdapter, Reader
from octavo.features.lora.targets import Targets
from octavo.features.lora.worker import LoraWorker
from octavo.nn.shard import Cut
from octavo.worker.mover import Mover

POLL_S, PAUSE_S = 0.001, 0.2
STEP_S, PLANNING_S = 0.0055, 0.0025
"""Decodes of eight streams of an 8B model on an H200, and about what the host does for each."""
LONG_STEP_S, LONG_PLANNING_S = 0.015, 0.006
PART_S = 0.005
LARGEST = 64
QUEUE = [64, 64, 8, 16, 64, 8]


class LateCopy:
    """A copy that ends at a time."""

    def __init__(self, values: torch.Tensor, end: float) -> None:
        self._values, self.end = values, end

    def done(self) -> bool:
        return time.perf_counter() >= self.end

    def wait(self) -> torch.Tensor:
        time.sleep(max(0.0, self.end - time.perf_counter()))
        return self._values


class Simulated(HostCopier):
    """Copies to a device that is not there, one after the other."""

    anywhere = True

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s, self._last = bytes_per_s, 0.0

    def room(self, *shape: int) -> torch.Tensor:
        return torch.ones(shape, dtype=torch.uint8)  # written, as pinned memory is

    def into(self, values: torch.Tensor, write: object, after: Mark | None) -> LateCopy:
        self._last = max(self._last, time.perf_counter()) + values.nbytes / self._bytes_per_s
        return LateCopy(values, self._last)


class Worker:
    """The worker half of a server on a GPU, and what moves its pages."""

    def __init__(self, args: argparse.Namespace) -> None:
        every = targets()
        count = len(every)
        cuts = tuple((Cut(),) * len(one.parts) for one in every)
        orders = tuple((None,) * len(one.parts) for one in every)
        layers = Targets(every, (torch.nn.Identity(),) * count, cuts, orders)
        geometry = dataclasses.replace(BLOCK, by_output=True)
        self.reader = Reader(layers, geometry, torch.bfloat16, no_gains)
        self.hook = LoraWorker(8, LARGEST)
        self.hook._targets, self.hook._geometry, self.hook._reader = layers, geometry, self.reader
        self.hook._site = SimpleNamespace(device=SimpleNamespace(resident=True))  # type: ignore[assignment]
        if args.fillers:
            self.hook._host._fillers = ThreadPoolExecutor(args.fillers)
        if args.device == "cuda":
            from octavo.worker.blocks import Blocks

            link = link_of(torch.device("cuda"))
            self.blocks: Any = Blocks.none(link)
            self.blocks._cache = torch.zeros(LAYERS, args.blocks, 16 * KEYS * 2, dtype=torch.bfloat16, device="cuda")
        else:
            link = SimpleNamespace(copier=partial(Simulated, args.bandwidth * 1e9))  # type: ignore[assignment]
            self.blocks = SimpleNamespace(page_bytes=geometry.block_bytes, scatter=no_gains)
        sizes = args.rooms or worker._ROOMS, args.room_mib << 20 if args.room_mib else worker._ROOM_BYTES
        with patch.object(worker, "_ROOMS", sizes[0]), patch.object(worker, "_ROOM_BYTES", sizes[1]):
            self.mover = Mover(self.blocks, link, {NAME: self.hook})
        self._checker = Checker(every, 256)
        self._uid = 0

    def reading(self, folder: Path) -> Reading:
        """Return what the engine half says of an adapter."""
        self._uid += 1
        file = self._checker.read(folder)
        return Reading(self._uid, (Source(str(folder), file.manifest, file=file.packed()),), file.manifest)

    def load(self, folders: Sequence[Path], *, steps: bool) -> list[float]:
        """Return the seconds until each adapter was in blocks."""
        readings = [self.reading(folder) for folder in folders]
        ends: dict[int, float] = {}
        began = time.perf_counter()
        reads = {one.uid: self.hook.call("read", msgspec.to_builtins(one)) for one in readings}
        block = 0
        while len(ends) < len(readings):
            loads = []
            for uid in [uid for uid, read in reads.items() if read.done()]:
                reads.pop(uid).result()
                count = self.hook._layouts[uid].num_blocks
                loads.append(Transfer(uid, NAME, page_names(uid, count), list(range(block, block + count))))
                block += count
            if loads:
                self.mover.begin(Transfers(loads=loads))
            self._pass_time(steps=steps)
            for news in self.mover.take():
                assert news.state is TransferState.ENDED
                assert not news.failed
                ends[news.ticket] = time.perf_counter() - began
        time.sleep(PAUSE_S)  # what goes on afterwards has time to end
        for one in readings:
            self.hook.call("drop", {"uid": one.uid})
        return [ends[one.uid] for one in readings]

    def _pass_time(self, *, steps: bool) -> None:
        if not steps:
            time.sleep(POLL_S)
            return
        pass_step(self.mover, STEP_S, PLANNING_S)


class Waiting:
    """A tier with the rooms of adapters, whose parts take a while to read."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(6)

    def rooms(self, page_bytes: int) -> tuple[int, int]:
        return 8, 8

    def load(self, names: Sequence[bytes], room: Callable[[], torch.Tensor]) -> Future[Collection[int]]:
        def read() -> Collection[int]:
            room()
            time.sleep(PART_S)
            return ()

        return self._threads.submit(read)


def waits(parts: int, step_s: float, planning_s: float, bytes_per_s: float) -> float:
    """Return the seconds that a load of `parts` parts takes beside steps."""
    blocks = SimpleNamespace(page_bytes=BLOCK.block_bytes, scatter=no_gains)
    link = SimpleNamespace(copier=partial(Simulated, bytes_per_s))
    mover = Mover(blocks, link, {NAME: Waiting()})  # type: ignore[arg-type, dict-item]
    count = 8 * parts
    began = time.perf_counter()
    mover.begin(Transfers(loads=[Transfer(1, NAME, [b""] * count, list(range(count)))]))
    while not (news := mover.take()):
        pass_step(mover, step_s, planning_s)
    assert not news[0].failed
    taken = time.perf_counter() - began
    mover.close()
    return taken


def pass_step(mover: Mover, step_s: float, planning_s: float) -> None:
    began = time.perf_counter()
    while time.perf_counter() < began + planning_s / 2:
        pass
    mover.advance()
    while time.perf_counter() < began + planning_s:
        pass
    time.sleep(step_s - planning_s)


class Stages:
    """The processor time of functions that this thread calls; calls within calls count for the inner one."""

    def __init__(self) -> None:
        self.spent: dict[str, float] = defaultdict(float)
        self._inner = [0.0]
        self._thread = threading.get_ident()

    @contextmanager
    def watching(self, **functions: tuple[Any, str]) -> Iterator[None]:
        """Count functions, given as name=(owner, attribute)."""
        places = [(name, owner, attribute, getattr(owner, attribute)) for name, (owner, attribute) in functions.items()]
        for name, owner, attribute, function in places:
            setattr(owner, attribute, self._timed(name, function))
        yield
        for _, owner, attribute, function in places:
            setattr(owner, attribute, function)

    def _timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != self._thread:
                return function(*args, **kwargs)
            self._inner.append(0.0)
            began = time.thread_time()
            result = function(*args, **kwargs)
            whole = time.thread_time() - began
            self.spent[name] += whole - self._inner.pop()
            self._inner[-1] += whole
            return result

        return timed


def floor(path: Path, threads: int) -> float:
    """Return the seconds in which threads read a file into memory in use."""
    size = path.stat().st_size
    memory = torch.ones(size, dtype=torch.uint8).numpy().data
    fd = os.open(path, os.O_RDONLY)

    def read(begin: int, end: int) -> None:
        while begin < end:
            begin += os.preadv(fd, [memory[begin:end]], begin)

    shares = [(size * i // threads, size * (i + 1) // threads) for i in range(threads)]
    running = [threading.Thread(target=read, args=share) for share in shares]
    began = time.perf_counter()
    for one in running:
        one.start()
    for one in running:
        one.join()
    taken = time.perf_counter() - began
    os.close(fd)
    return taken


def fill(worker_: Worker, folder: Path) -> tuple[float, dict[str, float]]:
    """Return the processor time in which one thread reads all pages, a room after the other, and that of its stages."""
    adapter: OpenAdapter = worker_.reader.open(worker_.reading(folder))
    stages = Stages()
    watched: dict[str, tuple[Any, str]] = {"other": (OpenAdapter, "fill"), "preadv": (direct, "read_all")}
    watched["multiply"] = direct, "_multiply"
    room = worker_.hook.rooms(BLOCK.block_bytes)[0]
    count = adapter.layout.num_blocks
    pages = torch.ones(count, BLOCK.block_bytes, dtype=torch.uint8)  # written
    with stages.watching(**watched):
        began = time.thread_time()
        for first in range(0, count, room):
            adapter.fill(first, pages[first : first + room])
        taken = time.thread_time() - began
    return taken, stages.spent


def milliseconds(found: Sequence[dict[str, float]]) -> dict[str, list[float]]:
    """Return the median and the least of each."""
    return {
        name: [round(of([one[name] for one in found]) * 1e3, 1) for of in (statistics.median, min)] for name in found[0]
    }


def measure(args: argparse.Namespace, folder: Path, report: Report) -> None:
    every, dtype = targets(), getattr(torch, args.dtype)
    folders = {rank: folder / str(rank) for rank in sorted({*args.ranks, *args.queue})}
    for rank, place in folders.items():
        place.mkdir()
        save(place, every, rank, dtype)
    worker_ = Worker(args)
    for rank in args.ranks:
        path = folders[rank] / "adapter_model.safetensors"
        size = path.stat().st_size
        found = []
        for _ in range(args.repeat):
            one = {"floor, 1 thread": floor(path, 1), f"floor, {args.threads} threads": floor(path, args.threads)}
            taken, stages = fill(worker_, folders[rank])
            one |= {"fill": taken} | {f"fill, {name}": value for name, value in stages.items()}
            one["alone"] = worker_.load([folders[rank]], steps=False)[0]
            one["beside steps"] = worker_.load([folders[rank]], steps=True)[0]
            found.append(one)
        report.note(f"rank {rank}, {size / 1e6:.1f} MB", milliseconds(found))
    places = [folders[rank] for rank in args.queue]
    queues = [worker_.load(places, steps=True) for _ in range(args.repeat)]
    names = [f"{number}, rank {rank}" for number, rank in enumerate(args.queue)]
    found = []
    for _ in range(args.repeat):
        one = {}
        for parts in (5, 21):
            for step_s, planning_s in ((STEP_S, PLANNING_S), (LONG_STEP_S, LONG_PLANNING_S)):
                taken = waits(parts, step_s, planning_s, args.bandwidth * 1e9)
                one[f"{parts} parts, steps of {step_s * 1e3:g} ms"] = taken
        found.append(one)
    report.note("waits", milliseconds(found))
    report.note("in a queue", milliseconds([dict(zip(names, one, strict=True)) for one in queues]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[16, LARGEST])
    parser.add_argument("--queue", type=int, nargs="+", default=QUEUE)
    parser.add_argument("--repeat", type=int, default=10)
    parser.add_argument("--threads", type=int, default=4)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--bandwidth", type=float, default=50.0, help="GB/s of copies to a device that is not there")
    parser.add_argument("--blocks", type=int, default=2000, help="on the device")
    parser.add_argument("--fillers", type=int, help="threads that fill rooms")
    parser.add_argument("--rooms", type=int, help="at most")
    parser.add_argument("--room-mib", type=int, help="MiB of a room")
    parser.add_argument("--folder", type=Path, help="for the adapters' files, on a file system such as ext4")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    switch_threads_often()  # both as an engine core does
    keep_freed_memory()
    facts = describe() | {"dtype": args.dtype, "device": args.device, "hidden": HIDDEN, "layers": LAYERS}
    facts |= {"gpu": describe_gpu()} if args.device == "cuda" else {"bandwidth_gb_s": args.bandwidth}
    report = Report(facts, args.output)
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        measure(args, Path(folder), report)


if __name__ == "__main__":
    main()
