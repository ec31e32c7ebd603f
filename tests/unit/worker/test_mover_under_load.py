"""Pages that move beside steps which are still queued when a transfer begins: bytes as they are, in both directions.

On a GPU the computing stream is kept busy and copies have a stream of their own, so that nothing is in order by chance.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from octavo.core.cache_groups import CacheGroup, GroupKind
from octavo.core.output import TransferState
from octavo.core.plan import Transfer, Transfers
from octavo.device.transfer import link_of
from octavo.nn.attention.base import AttentionSpec
from octavo.nn.attention.layer import PagedAttention
from octavo.worker.blocks import Blocks
from octavo.worker.hooks import WorkerHook
from octavo.worker.mover import Mover

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
GROUPS = (CacheGroup(layers=(0, 2)), CacheGroup(GroupKind.WINDOW, (1, 3), window=4))
COUNT, EACH, TURNS = 64, 4, 60
CYCLES = 3_000_000
"""More than a millisecond of a GPU's time."""


class Shelf(WorkerHook):
    """Keeps the very memory that it is given, and fills what it is asked to fill in a thread."""

    name = "shelf"

    def __init__(self, rooms: tuple[int, int]) -> None:
        self._rooms = rooms
        self.pages: dict[bytes, Tensor] = {}
        self._threads = ThreadPoolExecutor(2)

    def rooms(self, page_bytes: int) -> tuple[int, int]:
        return self._rooms

    def store(self, names: Sequence[bytes], pages: Tensor) -> Future[Collection[int]]:
        return self._threads.submit(self._store, names, pages)

    def load(self, names: Sequence[bytes], room: Callable[[], Tensor]) -> Future[Collection[int]]:
        return self._threads.submit(self._load, names, room)

    def _store(self, names: Sequence[bytes], pages: Tensor) -> Collection[int]:
        self.pages.update(zip(names, pages, strict=True))
        return ()

    def _load(self, names: Sequence[bytes], room: Callable[[], Tensor]) -> Collection[int]:
        for page, name in zip(room(), names, strict=True):
            page.copy_(self.pages[name])
        return ()


class Load:
    """Steps that write and read blocks, and what is known of their contents. Nothing waits for the device."""

    def __init__(self, dtype: torch.dtype, seed: int) -> None:
        layers = [PagedAttention(AttentionSpec(8, 4, 64, 1.0), None) for _ in range(4)]  # type: ignore[arg-type]
        link = link_of(DEVICE)
        self.blocks = Blocks(layers, GROUPS, (COUNT, 2, 16, 4, 64), 16, dtype, link)
        self.rng = random.Random(seed)
        self._bytes = torch.Generator(DEVICE).manual_seed(seed)
        self._content = dict(zip(range(COUNT), self.made(COUNT), strict=True))
        self.blocks.scatter(list(self._content), torch.stack([*self._content.values()]))
        self.free = set(range(COUNT))
        self._reads: list[tuple[Tensor, Tensor]] = []

    def made(self, count: int) -> Tensor:
        shape = (count, self.blocks.page_bytes)
        return torch.randint(0, 256, shape, dtype=torch.uint8, device=DEVICE, generator=self._bytes)

    def take(self) -> list[int]:
        taken = self.rng.sample(sorted(self.free), EACH)
        self.free -= set(taken)
        return taken

    def step(self, writes: Sequence[int], pages: Tensor | None = None) -> None:
        """A step that takes a while, and then reads blocks, or overwrites them with pages."""
        if DEVICE.type == "cuda":
            torch.cuda._sleep(CYCLES)
        if pages is None:
            self._reads.append((self.blocks.gather(writes), torch.stack([self._content[block] for block in writes])))
        else:
            self.blocks.scatter(writes, pages)
            self.now(writes, pages)

    def now(self, blocks: Sequence[int], pages: Tensor) -> None:
        self._content.update(zip(blocks, pages, strict=True))

    def check(self) -> None:
        self.step(range(COUNT))
        for found, expected in self._reads:
            assert torch.equal(found, expected)


@pytest.mark.parametrize("rooms", [(0, 0), (3, 2)], ids=["memory of their own", "rooms"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_pages_are_as_steps_before_left_them_and_are_there_for_steps_after(
    dtype: torch.dtype, rooms: tuple[int, int]
) -> None:
    seed = int.from_bytes(os.urandom(4))
    print("seed", seed)
    load, shelf = Load(dtype, seed), Shelf(rooms)
    mover = Mover(load.blocks, link_of(DEVICE), {"shelf": shelf})
    written: dict[bytes, Tensor] = {}
    held: dict[int, Transfer] = {}
    unread: set[int] = set()
    stored: list[bytes] = []

    def take_in() -> None:
        for news in mover.take():
            assert not news.failed
            transfer = held[news.ticket]
            if news.ticket in unread:
                unread.discard(news.ticket)
                load.free |= set(transfer.blocks)
            if news.state is TransferState.ENDED:
                del held[news.ticket]
                if news.ticket % 2:
                    load.now(transfer.blocks, torch.stack([written[name] for name in transfer.pages]))
                    load.step(transfer.blocks)
                else:
                    stored.extend(transfer.pages)

    for turn in range(TURNS):
        while len(load.free) < 2 * EACH:
            take_in()
        blocks, pages = load.take(), load.made(EACH)
        load.step(blocks, pages)
        store = Transfer(2 * turn, "shelf", [b"%d/%d" % (turn, i) for i in range(EACH)], blocks)
        written.update(zip(store.pages, pages, strict=True))
        loads = []
        if len(stored) >= EACH:
            loads = [Transfer(2 * turn + 1, "shelf", load.rng.sample(stored, EACH), load.take())]
            load.step(loads[0].blocks)  # what is queued still reads what was there before
        held |= {one.ticket: one for one in (store, *loads)}
        unread |= {one.ticket for one in (store, *loads)}
        mover.begin(Transfers(loads=loads, stores=[store]))
        load.step(blocks)
        take_in()
    while held:
        take_in()
    load.check()
    assert len(stored) == TURNS * EACH
    assert all(torch.equal(shelf.pages[name], written[name].cpu()) for name in stored)
    mover.close()
