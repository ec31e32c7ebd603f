"""Pages between blocks and a tier: bytes as they are, and reports in the order in which things happen."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from octavo.core.cache_groups import CacheGroup, GroupKind
from octavo.core.output import Moved, TransferState
from octavo.core.plan import Transfer, Transfers
from octavo.device.transfer import Copy, HostCopier, HostCopy, HostLink, Mark
from octavo.nn.attention.base import AttentionSpec
from octavo.nn.attention.layer import PagedAttention
from octavo.worker.blocks import Blocks
from octavo.worker.hooks import WorkerHook
from octavo.worker.mover import Mover

DTYPES = [torch.float32, torch.bfloat16, torch.int8, torch.float8_e4m3fn]
GROUPS = (CacheGroup(layers=(0, 2)), CacheGroup(GroupKind.WINDOW, (1,), window=4))
LINK = HostLink(torch.device("cpu"))


def blocks_of(dtype: torch.dtype) -> tuple[Blocks, Tensor]:
    """Three layers in two groups over eight blocks of random bytes, and the bytes."""
    layers = [PagedAttention(AttentionSpec(2, 1, 4, 1.0), None) for _ in range(3)]  # type: ignore[arg-type]
    blocks = Blocks(layers, GROUPS, (8, 2, 4, 1, 4), 4, dtype, LINK)
    raw = blocks._cache.view(torch.uint8)
    raw.copy_(torch.randint(0, 256, raw.shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0)))
    return blocks, raw


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_pages_hold_a_block_of_all_layers(dtype: torch.dtype) -> None:
    blocks, raw = blocks_of(dtype)
    pages = blocks.gather([5, 2])
    assert pages.shape == (2, blocks.page_bytes)
    assert torch.equal(pages[0], raw[:, 5].flatten())
    assert torch.equal(pages[1], raw[:, 2].flatten())
    before = raw.clone()
    blocks.scatter([1, 7], pages)
    before[:, 1], before[:, 7] = before[:, 5], before[:, 2]
    assert torch.equal(raw, before)


class Slow(WorkerHook):
    """Ends what it is asked when the test says so."""

    name = "slow"

    def __init__(self) -> None:
        self.kept: dict[bytes, Tensor] = {}
        self.futures: list[Future[Collection[int]]] = []

    def store(self, names: Sequence[bytes], pages: Tensor) -> Future[Collection[int]]:
        self.kept.update(zip(names, pages, strict=True))
        return self._later()

    def load(self, names: Sequence[bytes], room: Callable[[], Tensor]) -> Future[Collection[int]]:
        if b"odd" in names:
            raise KeyError("odd")
        pages = room()
        for i, name in enumerate(names):
            if name in self.kept:
                pages[i] = self.kept[name]
        return self._later()

    def _later(self) -> Future[Collection[int]]:
        self.futures.append(Future())
        return self.futures[-1]


def moved(ticket: int, state: TransferState, *failed: int) -> Moved:
    return Moved(ticket, state, list(failed))


def test_a_store_and_a_load_report_when_blocks_are_free_and_pages_are_there() -> None:
    blocks, raw = blocks_of(torch.float32)
    hook = Slow()
    mover = Mover(blocks, LINK, {"slow": hook})
    stored = raw[:, 3].clone()
    mover.begin(Transfers(stores=[Transfer(1, "slow", [b"a", b"b"], [3, 4])]))
    assert mover.take() == [moved(1, TransferState.READ)]
    raw[:, 3] = 0
    assert mover.take() == []
    hook.futures[0].set_result([1])
    assert mover.take() == [moved(1, TransferState.ENDED, 1)]
    mover.begin(Transfers(loads=[Transfer(2, "slow", [b"a"], [6])], doubted=[1, 2]))
    assert mover.take() == [moved(1, TransferState.UNKNOWN), moved(2, TransferState.UNKNOWN)]
    assert not torch.equal(raw[:, 6], stored)
    hook.futures[1].set_result(())
    assert mover.take() == [moved(2, TransferState.ENDED)]
    assert torch.equal(raw[:, 6], stored)
    mover.begin(Transfers(doubted=[2]))
    assert mover.take() == [moved(2, TransferState.UNKNOWN)]


def test_a_large_store_is_handed_over_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks, raw = blocks_of(torch.float32)
    monkeypatch.setattr("octavo.worker.stores._PART_BYTES", 2 * blocks.page_bytes)
    hook = Slow()
    mover = Mover(blocks, LINK, {"slow": hook})
    names = [b"%d" % i for i in range(5)]
    mover.begin(Transfers(stores=[Transfer(1, "slow", names, [7, 6, 5, 4, 3])]))
    assert len(hook.futures) == 3
    assert all(torch.equal(hook.kept[name], raw[:, 7 - i].flatten()) for i, name in enumerate(names))
    hook.futures[2].set_result([0])
    assert mover.take() == [moved(1, TransferState.READ)]
    hook.futures[0].set_result([1])
    assert mover.take() == []
    hook.futures[1].set_exception(OSError("a disk"))
    assert mover.take() == [moved(1, TransferState.ENDED, 1, 2, 3, 4)]


def test_copies_beside_steps_are_handed_over_without_one() -> None:
    """Blocks are reported as read once all copies have ended."""
    blocks, raw = blocks_of(torch.float32)
    hook, copier = Announcing(), Beside()
    mover = Mover(blocks, CopierLink(copier), {"slow": hook})
    mover.begin(Transfers(stores=[Transfer(1, "slow", [b"a"], [3])]))
    assert mover.take() == []
    copier.ended.set()
    assert hook.called.wait(30)
    hook.futures[0].set_result(())
    while not (news := mover.take()):
        """The thread notes what the tier returned."""
    assert news == [moved(1, TransferState.ENDED)]
    assert torch.equal(hook.kept[b"a"], raw[:, 3].flatten())
    mover.close()


class Announcing(Slow):
    def __init__(self) -> None:
        super().__init__()
        self.called = threading.Event()

    def _later(self) -> Future[Collection[int]]:
        future = super()._later()
        self.called.set()
        return future


class Beside(HostCopier):
    """Copies that end when the test says so, whether steps go on or not."""

    anywhere = True

    def __init__(self) -> None:
        self.ended = threading.Event()

    def out(self, read: Callable[[], Tensor]) -> Copy:
        values, ended = read(), self.ended

        class Pending(HostCopy):
            def done(self) -> bool:
                return ended.is_set()

            def wait(self) -> Tensor:
                assert ended.wait(30)
                return values

        return Pending(values)


class Waited(HostCopy):
    """A copy that has not ended before somebody waits for it."""

    waited = 0

    def done(self) -> bool:
        return False

    def wait(self) -> Tensor:
        Waited.waited += 1
        if Waited.waited == 1:
            raise RuntimeError("the device is lost")
        return self.values


class LateLink(HostLink):
    def copier(self) -> Any:
        copier = HostCopier()
        copier.out = lambda read: Waited(read())  # type: ignore[method-assign]
        copier.into = lambda values, write, after: Waited(values)  # type: ignore[method-assign]
        return copier


def test_memory_is_freed_when_nothing_is_copied_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """All copies under way are waited for, although the first one fails."""
    monkeypatch.setattr(Waited, "waited", 0)
    blocks, _ = blocks_of(torch.float32)
    hook = Slow()
    mover = Mover(blocks, LateLink(torch.device("cpu")), {"slow": hook})
    stores = [Transfer(1, "slow", [b"a"], [3]), Transfer(2, "slow", [b"b"], [4])]
    loads = [Transfer(3, "slow", [b"c"], [5]), Transfer(4, "slow", [b"d"], [6])]
    mover.begin(Transfers(loads=loads, stores=stores))
    hook.futures[0].set_result(())
    assert mover.take() == []
    mover.close()
    assert Waited.waited == 3, "the fourth has not begun to copy"
    mover.close()
    assert Waited.waited == 3
    assert mover.take() == []


def test_a_load_that_fails_writes_nothing() -> None:
    blocks, raw = blocks_of(torch.float32)
    hook = Slow()
    mover = Mover(blocks, LINK, {"slow": hook})
    before = raw.clone()
    loads = [Transfer(1, "slow", [b"a", b"b"], [3, 4]), Transfer(2, "slow", [b"odd"], [5])]
    mover.begin(Transfers(loads=[*loads, Transfer(3, "strange", [b"c", b"d"], [6, 7])]))
    assert mover.take() == [moved(2, TransferState.ENDED, 0), moved(3, TransferState.ENDED, 0, 1)]
    hook.futures[0].set_exception(OSError("a disk"))
    assert mover.take() == [moved(1, TransferState.ENDED, 0, 1)]
    assert torch.equal(raw, before)
    assert mover.take() == []


class Held(HostCopier):
    """Allocates when the test says so."""

    def __init__(self) -> None:
        self.asked, self.go = threading.Event(), threading.Event()

    def room(self, *shape: int) -> Tensor:
        self.asked.set()
        assert self.go.wait(10), "nothing goes on while memory is allocated"
        return super().room(*shape)


class Lent(HostCopier):
    """Remembers what it allocated, and whose copies end when the test says so."""

    def __init__(self) -> None:
        self.made: list[Tensor] = []
        self.copies: list[Later] = []
        self.marks: list[object] = []
        self.afters: list[object] = []
        self.late = False

    def room(self, *shape: int) -> Tensor:
        self.made.append(super().room(*shape))
        return self.made[-1]

    def mark(self) -> Mark:
        self.marks.append(object())
        return self.marks[-1]  # type: ignore[return-value]

    def into(self, values: Tensor, write: Callable[[Tensor], None], after: Mark | None) -> Copy:
        self.afters.append(after)
        self.copies.append(Later(values, write, over=not self.late))
        return self.copies[-1]


class Later:
    """A copy that reads its values when it ends."""

    def __init__(self, values: Tensor, write: Callable[[Tensor], None], *, over: bool) -> None:
        self.values, self.write = values, write
        self.over = self.waited = False
        if over:
            self.end()

    def end(self) -> None:
        self.write(self.values)
        self.over = True

    def done(self) -> bool:
        return self.over

    def wait(self) -> Tensor:
        self.waited = True
        return self.values


class CopierLink(HostLink):
    def __init__(self, copier: Any) -> None:
        super().__init__(torch.device("cpu"))
        self._copier = copier

    def copier(self) -> Any:
        return self._copier


class Threaded(Slow):
    """Loads in a thread."""

    def __init__(self) -> None:
        super().__init__()
        self.threads = ThreadPoolExecutor(1)

    def load(self, names: Sequence[bytes], room: Callable[[], Tensor]) -> Future[Collection[int]]:
        return self.threads.submit(self._load, names, room)

    def _load(self, names: Sequence[bytes], room: Callable[[], Tensor]) -> Collection[int]:
        pages = room()
        for i, name in enumerate(names):
            pages[i] = self.kept[name]
        return ()


def test_no_step_waits_while_a_load_allocates_memory() -> None:
    blocks, raw = blocks_of(torch.float32)
    held, hook = Held(), Threaded()
    mover = Mover(blocks, CopierLink(held), {"slow": hook})
    hook.kept[b"a"] = raw[:, 3].flatten().clone()
    mover.begin(Transfers(loads=[Transfer(1, "slow", [b"a"], [6])]))
    assert held.asked.wait(10)
    for _ in range(3):
        assert mover.take() == []
    held.go.set()
    hook.threads.shutdown()
    assert mover.take() == [moved(1, TransferState.ENDED)]
    assert torch.equal(raw[:, 6], raw[:, 3])


class InRooms(Slow):
    """Loads into two rooms of two pages.

    Attributes:
        asked: the names of each call.
    """

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[list[bytes]] = []

    def rooms(self, page_bytes: int) -> tuple[int, int]:
        return 2, 2

    def load(self, names: Sequence[bytes], room: Callable[[], Tensor]) -> Future[Collection[int]]:
        self.asked.append(list(names))
        return super().load(names, room)


@pytest.fixture
def in_rooms() -> tuple[Mover, InRooms, Lent, Tensor]:
    """A mover over five kept pages, a to e, with the contents of blocks 0 to 4."""
    blocks, raw = blocks_of(torch.float32)
    hook, lent = InRooms(), Lent()
    hook.kept = {b"abcde"[i : i + 1]: raw[:, i].flatten().clone() for i in range(5)}
    return Mover(blocks, CopierLink(lent), {"slow": hook}), hook, lent, raw


LARGE = Transfer(1, "slow", [b"e", b"d", b"c", b"b", b"a"], [0, 1, 2, 3, 4])
"""Turns five pages round."""


def test_a_load_takes_turns_in_rooms(in_rooms: tuple[Mover, InRooms, Lent, Tensor]) -> None:
    mover, hook, lent, raw = in_rooms
    before, lent.late = raw.clone(), True
    mover.begin(Transfers(loads=[LARGE]))
    mover.begin(Transfers(loads=[Transfer(2, "slow", [b"a"], [7])]))
    assert hook.asked == [[b"e", b"d"], [b"c", b"b"]]
    hook.futures[1].set_result(())
    assert mover.take() == []
    assert len(hook.asked) == 2, "a room is read until its copy ends"
    lent.copies[0].end()
    assert mover.take() == []
    assert hook.asked[2:] == [[b"a"]], "the load that came first goes on"
    hook.futures[0].set_result(())
    hook.futures[2].set_result(())
    assert mover.take() == []
    lent.copies[2].end()
    assert mover.take() == []
    assert hook.asked[3:] == [[b"a"]]
    lent.copies[1].end()
    assert mover.take() == [moved(1, TransferState.ENDED)]
    assert torch.equal(raw[:, :5], before[:, :5].flip(1))
    hook.futures[3].set_result(())
    assert mover.take() == []
    lent.copies[3].end()
    assert mover.take() == [moved(2, TransferState.ENDED)]
    assert torch.equal(raw[:, 7], before[:, 0])
    assert [tuple(room.shape) for room in lent.made] == [(2, raw[:, 0].numel())] * 2, "no load allocates memory"


def test_a_small_load_passes_a_large_one_but_not_for_ever(in_rooms: tuple[Mover, InRooms, Lent, Tensor]) -> None:
    mover, hook, _, _ = in_rooms
    mover.begin(Transfers(loads=[LARGE, Transfer(2, "slow", [b"a"], [7])]))
    assert hook.asked == [[b"a"], [b"e", b"d"]], "both lack rooms, and the small one needs one of them"
    mover.begin(Transfers(loads=[Transfer(3, "slow", [b"b"], [6])]))
    for future in hook.futures:
        future.set_result(())
    mover.advance()
    assert hook.asked[2:] == [[b"c", b"b"], [b"a"]], "one that comes after as many parts as the large one has left"


def test_copies_wait_for_no_step_that_was_launched_after_the_load_began(
    in_rooms: tuple[Mover, InRooms, Lent, Tensor],
) -> None:
    mover, hook, lent, _ = in_rooms
    mover.begin(Transfers(loads=[LARGE]))
    mover.begin(Transfers(loads=[Transfer(2, "slow", [b"a"], [7])]))
    while len(hook.futures) < 4 or not hook.futures[-1].done():
        hook.futures[sum(one.done() for one in hook.futures)].set_result(())
        mover.take()
    assert lent.afters == [lent.marks[0]] * 3 + [lent.marks[1]]


def test_copies_begin_before_a_step_although_news_are_taken_after_it(
    in_rooms: tuple[Mover, InRooms, Lent, Tensor],
) -> None:
    mover, hook, lent, _ = in_rooms
    mover.begin(Transfers(loads=[Transfer(1, "slow", [b"a"], [7])]))
    hook.futures[0].set_result(())
    mover.advance()
    assert len(lent.copies) == 1
    mover.advance()
    assert mover.take() == [moved(1, TransferState.ENDED)]


@pytest.mark.parametrize("error", [False, True])
def test_a_load_has_failed_once_nothing_of_it_is_under_way(
    error: bool, in_rooms: tuple[Mover, InRooms, Lent, Tensor]
) -> None:
    """Its blocks are used for something else then."""
    mover, hook, lent, _ = in_rooms
    lent.late = True
    mover.begin(Transfers(loads=[LARGE]))
    hook.futures[0].set_result(())
    assert mover.take() == []
    if error:
        hook.futures[1].set_exception(OSError("a disk"))
    else:
        hook.futures[1].set_result([1])
    assert mover.take() == [], "a copy writes to blocks"
    lent.copies[0].end()
    assert mover.take() == [moved(1, TransferState.ENDED, *(range(5) if error else [3]))]
    assert len(hook.asked) == 2
    mover.begin(Transfers(loads=[msgspec.structs.replace(LARGE, ticket=2)]))
    assert len(hook.asked) == 4, "both rooms are free again"


def test_parts_that_are_read_after_a_failure_are_not_copied(in_rooms: tuple[Mover, InRooms, Lent, Tensor]) -> None:
    mover, hook, lent, raw = in_rooms
    before = raw.clone()
    mover.begin(Transfers(loads=[LARGE]))
    hook.futures[1].set_result([0])
    assert mover.take() == [], "the tier writes to a room"
    hook.futures[0].set_result(())
    assert mover.take() == [moved(1, TransferState.ENDED, 2)]
    assert lent.copies == []
    assert torch.equal(raw, before)


def test_a_part_that_can_not_be_begun_fails_the_load(in_rooms: tuple[Mover, InRooms, Lent, Tensor]) -> None:
    mover, hook, _, _ = in_rooms
    odd = Transfer(1, "slow", [b"a", b"b", b"odd"], [5, 6, 7])
    mover.begin(Transfers(loads=[odd, msgspec.structs.replace(LARGE, ticket=2)]))
    assert mover.take() == []
    hook.futures[0].set_result(())
    assert mover.take() == [moved(1, TransferState.ENDED, 0, 1, 2)]


def test_memory_is_freed_after_copies_of_parts(in_rooms: tuple[Mover, InRooms, Lent, Tensor]) -> None:
    mover, hook, lent, _ = in_rooms
    lent.late = True
    mover.begin(Transfers(loads=[LARGE]))
    hook.futures[0].set_result(())
    assert mover.take() == []
    mover.close()
    assert lent.copies[0].waited
    assert mover.take() == []
