"""Loads on a device whose copies may begin in any thread: they go on without a step, and no step waits for them."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from octavo.core.output import Moved, TransferState
from octavo.core.plan import Transfer, Transfers
from octavo.device.transfer import Copy, HostLink, Mark
from octavo.worker.hooks import WorkerHook
from octavo.worker.loads import Loads
from octavo.worker.mover import Mover

PAGES = 7
LIMIT_S = 10


class Device:
    """Blocks of a device, [16, 4]; `writes` counts copies into them."""

    page_bytes = 4

    def __init__(self) -> None:
        self.memory = torch.zeros(16, 4, dtype=torch.uint8)

    def scatter(self, blocks: Sequence[int], pages: Tensor) -> None:
        self.memory[list(blocks)] = pages


class Streamed:
    """A copy that ends when somebody waits for it, or when the test lets it end."""

    def __init__(self, values: Tensor, write: Callable[[Tensor], None], free: threading.Event) -> None:
        self._values, self._write, self._free = values, write, free
        self._lock = threading.Lock()
        self._over = False

    def done(self) -> bool:
        return self._over

    def wait(self) -> Tensor:
        assert self._free.wait(LIMIT_S)
        with self._lock:
            if not self._over:
                self._write(self._values)
                self._over = True
        return self._values


class Stream:
    """Copies beside steps. Each copy is made in the thread that it is named with."""

    anywhere = True

    def __init__(self) -> None:
        self.free = threading.Event()
        self.free.set()
        self.copies: list[tuple[str, Streamed]] = []
        self.begun = threading.Semaphore(0)
        self.broken = False

    def room(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.uint8)

    def mark(self) -> Mark | None:
        return None

    def into(self, values: Tensor, write: Callable[[Tensor], None], after: Mark | None) -> Copy:
        if self.broken:
            raise RuntimeError("the device is lost")
        self.copies.append((threading.current_thread().name, Streamed(values, write, self.free)))
        self.begun.release()
        return self.copies[-1][1]


class Tier(WorkerHook):
    """Page n has the byte n, and is filled in a thread once the test says so. There are two rooms of one page."""

    name = "tier"

    def __init__(self) -> None:
        self.threads = ThreadPoolExecutor(2, thread_name_prefix="tier")
        self.read: list[bytes] = []
        self.go = threading.Event()

    def rooms(self, page_bytes: int) -> tuple[int, int]:
        return 1, 2

    def load(self, names: Sequence[bytes], room: Callable[[], Tensor]) -> Future[Collection[int]]:
        return self.threads.submit(self._load, names, room)

    def _load(self, names: Sequence[bytes], room: Callable[[], Tensor]) -> Collection[int]:
        assert self.go.wait(LIMIT_S)
        room().copy_(torch.tensor([list(name) * 4 for name in names], dtype=torch.uint8))
        self.read += names
        return ()


class Link(HostLink):
    def __init__(self, stream: Stream) -> None:
        super().__init__(torch.device("cpu"))
        self._stream = stream

    def copier(self) -> Any:
        return self._stream


@pytest.fixture
def parts() -> Iterator[tuple[Mover, Tier, Stream, Device]]:
    device, stream, tier = Device(), Stream(), Tier()
    mover = Mover(device, Link(stream), {"tier": tier})  # type: ignore[arg-type]
    yield mover, tier, stream, device
    stream.free.set()
    tier.go.set()
    mover.close()
    tier.threads.shutdown()


LOAD = Transfer(1, "tier", [bytes([i + 1]) for i in range(PAGES)], list(range(PAGES)))


def begun(stream: Stream, count: int) -> None:
    """Wait until this many more copies have begun."""
    for _ in range(count):
        assert stream.begun.acquire(timeout=LIMIT_S)


def ended(mover: Mover) -> list[Moved]:
    """Return the news of all loads' ends."""
    waiting = threading.Event()
    for _ in range(LIMIT_S * 1000):
        if news := mover.take():
            return news
        waiting.wait(0.001)
    raise AssertionError("nothing has ended")


def test_all_parts_of_a_load_go_on_without_a_step(parts: tuple[Mover, Tier, Stream, Device]) -> None:
    mover, tier, stream, device = parts
    mover.begin(Transfers(loads=[LOAD]))
    tier.go.set()
    begun(stream, PAGES)  # in two rooms, while nobody calls the mover
    assert {name.rpartition("_")[0] for name, _ in stream.copies} <= {"tier", "octavo-rooms"}
    for _, copy in stream.copies:
        copy.wait()
    assert ended(mover) == [Moved(1, TransferState.ENDED, [])]
    assert device.memory[:PAGES, 0].tolist() == list(range(1, PAGES + 1))


def test_the_step_loop_does_not_wait_while_a_thread_begins_a_copy(parts: tuple[Mover, Tier, Stream, Device]) -> None:
    mover, tier, stream, _ = parts
    entered, go, into = threading.Event(), threading.Event(), stream.into

    def slow(*args: Any) -> Copy:
        entered.set()
        assert go.wait(LIMIT_S)
        return into(*args)

    stream.into = slow  # type: ignore[method-assign]
    mover.begin(Transfers(loads=[LOAD]))
    tier.go.set()
    assert entered.wait(LIMIT_S)
    assert mover.take() == []
    mover.advance()
    go.set()
    begun(stream, PAGES)


def test_rooms_are_not_used_again_before_their_copies_end(parts: tuple[Mover, Tier, Stream, Device]) -> None:
    mover, tier, stream, device = parts
    stream.free.clear()
    tier.go.set()
    mover.begin(Transfers(loads=[LOAD]))
    begun(stream, 2)
    assert mover.take() == []
    assert len(tier.read) == 2
    stream.free.set()
    begun(stream, PAGES - 2)
    for _, copy in stream.copies:
        copy.wait()
    ended(mover)
    assert device.memory[:PAGES, 3].tolist() == list(range(1, PAGES + 1))


def test_a_copy_that_can_not_begin_fails_the_load(parts: tuple[Mover, Tier, Stream, Device]) -> None:
    mover, tier, stream, _ = parts
    stream.broken = True
    tier.go.set()
    mover.begin(Transfers(loads=[LOAD]))
    assert ended(mover) == [Moved(1, TransferState.ENDED, list(range(PAGES)))]
    stream.broken = False
    mover.begin(Transfers(loads=[Transfer(2, "tier", LOAD.pages, LOAD.blocks)]))
    begun(stream, PAGES)


def test_nothing_is_copied_after_the_end(parts: tuple[Mover, Tier, Stream, Device]) -> None:
    mover, tier, stream, _ = parts
    mover.begin(Transfers(loads=[LOAD]))
    mover.close()
    tier.go.set()
    tier.threads.shutdown()
    assert stream.copies == []
    assert mover.take() == []


def test_a_load_that_ends_in_a_thread_is_known_until_its_end_is_reported() -> None:
    """Otherwise it would be reported as unknown, which is a failure, before its end."""
    tier, stream, news = Tier(), Stream(), list[str]()
    ending, go = threading.Event(), threading.Event()
    stream.broken = True

    def ended(transfer: Transfer, failed: Collection[int]) -> None:
        ending.set()
        assert go.wait(LIMIT_S)
        news.append("ended")

    def ask() -> None:
        assert 1 not in loads
        news.append("unknown")

    loads = Loads(Device(), stream, {"tier": tier}, ended)  # type: ignore[arg-type]
    loads.begin(Transfer(1, "tier", LOAD.pages[:1], LOAD.blocks[:1]))
    loads.advance()
    tier.go.set()
    assert ending.wait(LIMIT_S)
    asking = threading.Thread(target=ask)
    asking.start()
    asking.join(0.05)
    go.set()
    asking.join(LIMIT_S)
    assert news == ["ended", "unknown"]
    loads.close()
    tier.threads.shutdown()


def test_rooms_are_freed_with_the_mover() -> None:
    """Not by a collection: an engine exempts what exists at its start, and each sleep would keep pinned memory."""
    mover = Mover(Device(), Link(Stream()), {"tier": Tier()})  # type: ignore[arg-type]
    freed = weakref.ref(mover._loads)
    gc.disable()
    try:
        mover.close()
        del mover
        assert freed() is None
    finally:
        gc.enable()
