"""Sums whose rows copy engines move, against plain sums, with the work of all ranks' streams in random order.

On GPUs, `test_peer_sums.py` has two processes that sum so.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from octavo.parallel.copied_sums import SLOTS, CopiedSum, CopiedSums, area_bytes
from octavo.parallel.peer_memory import Inboxes, Sizes
from octavo.parallel.peers import Limits, PeerCollectives

pytest.importorskip("triton")

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ROOM = 256
Work = Callable[[], bool]
"""Does what it can do now; False if it must wait."""


class Streams:
    """The computing and the copying stream of each rank, whose work runs in an order that a seed draws: one stream runs
    for a while, often until it must wait, so that ranks are as far apart as they can be."""

    def __init__(self, ranks: int, seed: int) -> None:
        self.memory = [torch.zeros(area_bytes(ranks, ROOM), dtype=torch.uint8, device=DEVICE) for _ in range(ranks)]
        self.areas = [one.data_ptr() for one in self.memory]
        self.queues: list[deque[Work]] = [deque() for _ in range(2 * ranks)]
        self.random = random.Random(seed)

    def run(self) -> None:
        while any(self.queues):
            ready = [queue for queue in self.queues if queue]
            self.random.shuffle(ready)
            assert any(self._advance(queue) for queue in ready), "all streams wait"

    def _advance(self, queue: deque[Work]) -> bool:
        """Run some of a stream's work; return whether it did."""
        done, most = 0, self.random.choice((1, 3, 100))
        while done < most and queue and queue[0]():
            queue.popleft()
            done += 1
        return done > 0

    def at(self, address: int, size: int) -> Tensor:
        """Return the bytes at an address."""
        for area, memory in zip(self.areas, self.memory, strict=True):
            if area <= address < area + len(memory):
                assert address + size <= area + len(memory)
                return memory[address - area : address - area + size]
        raise AssertionError("an address out of the ranks' memory")


class ToyLane:
    """A `Lane` that enqueues its work."""

    def __init__(self, streams: Streams, rank: int) -> None:
        self.streams = streams
        self.computing, self.copying = streams.queues[2 * rank : 2 * rank + 2]

    def follow(self) -> None:
        self._pass_on(self.computing, self.copying)

    def copy(self, x: Tensor, target: int) -> None:
        self.compute(lambda: self.streams.at(target, x.nbytes).copy_(x.view(torch.uint8).flatten()), self.copying)

    def signal(self, flag: int, number: int) -> None:
        self.compute(lambda: self.streams.at(flag, 4).view(torch.int32).fill_(number), self.copying)

    def mark(self) -> list[bool]:
        reached: list[bool] = []
        self.compute(lambda: reached.append(True), self.copying)
        return reached

    def await_flag(self, flag: int, number: int) -> None:
        self.computing.append(lambda: int(self.streams.at(flag, 4).view(torch.int32)) >= number)

    def await_mark(self, mark: list[bool]) -> None:
        self.computing.append(lambda: bool(mark))

    def compute(self, launch: Callable[[], object], stream: deque[Work] | None = None) -> None:
        def run() -> bool:
            launch()
            return True

        (self.computing if stream is None else stream).append(run)

    def _pass_on(self, before: deque[Work], after: deque[Work]) -> None:
        reached: list[bool] = []
        self.compute(lambda: reached.append(True), before)
        after.append(lambda: bool(reached))


class Launched(CopiedSums):
    """Launches on the computing stream."""

    def _launch(self, *args: Any) -> None:
        assert isinstance(self._lane, ToyLane)
        self._lane.compute(lambda: super(Launched, self)._launch(*args))


class Ranks:
    def __init__(self, count: int, seed: int = 0) -> None:
        self.streams = Streams(count, seed)
        self.lanes = [ToyLane(self.streams, rank) for rank in range(count)]
        self.each = [Launched(i, self.streams.areas, ROOM, lane, DEVICE) for i, lane in enumerate(self.lanes)]

    def begin(self, parts: list[Tensor]) -> list[tuple[Tensor, CopiedSum]] | None:
        """Begin to sum products, which are computed on the stream."""
        begun = []
        for one, lane, part in zip(self.each, self.lanes, parts, strict=True):
            x = torch.full_like(part, float("nan"))
            lane.compute(lambda x=x, part=part: x.copy_(part))
            begun.append((x, one.begin(x)))
        assert len({found is None for _, found in begun}) == 1, "ranks differ"
        return None if begun[0][1] is None else [(x, found) for x, found in begun if found is not None]

    def totals(self, begun: list[tuple[Tensor, CopiedSum]]) -> list[Tensor]:
        found = [one.total() for _, one in begun]
        for lane, (x, _) in zip(self.lanes, begun, strict=True):
            lane.compute(lambda x=x: x.fill_(float("nan")))  # as what gets its memory next
        return found


def parts(count: int, rows: int = 2, width: int = 8, *, seed: int = 0) -> list[Tensor]:
    """Return values whose sums no dtype rounds: Triton's interpreter truncates instead."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(-30, 31, (rows, width), generator=generator).to(DEVICE).bfloat16() for _ in range(count)]


def total(each: list[Tensor]) -> Tensor:
    return torch.stack(each).float().sum(0)


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("waiting", [0, 1, 2, 3], ids=lambda most: f"{most} more before the end of one")
def test_sums_in_any_order_of_work(count: int, seed: int, waiting: int) -> None:
    """One more is on its way as with two parts of a step in turns; with more, some are refused."""
    ranks, begun, refused = Ranks(count, seed), deque[Any](), 0
    checked = []
    for number in range(4 * SLOTS):
        each = parts(count, 1 + number % 3, seed=number)
        found = ranks.begin(each)
        if found is None:
            refused += 1
        else:
            begun.append((found, total(each).bfloat16()))
        if begun and (len(begun) > waiting or found is None):
            one, expected = begun.popleft()
            checked += [(made, expected) for made in ranks.totals(one)]
    ranks.streams.run()
    assert len(checked) > count * SLOTS, "slots are used again"
    assert all(torch.equal(made, expected) for made, expected in checked)
    assert bool(refused) == (waiting > 1)


@pytest.mark.parametrize("wide", [torch.bfloat16, torch.float32], ids=str)
def test_a_sum_with_the_stream_and_its_norm(wide: torch.dtype) -> None:
    ranks, each, (weight,) = Ranks(3), parts(3), parts(1, 1, seed=2)
    (stream,) = (one.to(wide) for one in parts(1, seed=1))
    own = [stream.clone() for _ in each]
    begun = ranks.begin(each)
    assert begun is not None
    pairs = zip(begun, own, strict=True)
    first, *others = [one.normed_with(mine, (weight[0], 1e-5), torch.bfloat16) for (_, one), mine in pairs]
    ranks.streams.run()
    after = own[0].float()
    assert torch.equal(own[0], (stream.float() + total(each)).to(wide))
    norm = after * torch.rsqrt(after.square().mean(-1, keepdim=True) + 1e-5) * weight.float()
    torch.testing.assert_close(first.float(), norm, rtol=1e-2, atol=1e-2)
    assert all(torch.equal(other, first) for other in others)
    assert all(torch.equal(other, own[0]) for other in own)


def test_what_there_is_no_room_for_is_refused() -> None:
    ranks = Ranks(2)
    assert ranks.begin(parts(2, ROOM // 16 + 1)) is None
    assert ranks.begin(parts(2, 0)) is None
    assert ranks.begin(parts(2, ROOM // 16)) is not None


class Beginning:
    """`Collectives` that say that they were asked."""

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        return x[None]

    def most_hidden_bytes(self) -> int:
        return 0

    def begin_sum(self, x: Tensor) -> str:
        return "begun elsewhere"


def test_which_way_a_sum_is_begun() -> None:
    """Copied, if there is room; else by others, if these would sum it anyway."""
    sizes = Sizes(programs=1, slot=64, storers=1, room=512)
    inboxes = Inboxes(0, torch.zeros(2, dtype=torch.int64, device=DEVICE), sizes)
    group = PeerCollectives(inboxes, Beginning(), Limits(0, 0, 0, 1024))
    fits, stored, larger = (torch.zeros(rows, 8, device=DEVICE).bfloat16() for rows in (16, 64, 65))
    assert [group.begin_sum(one) for one in (fits, stored, larger)] == [None, None, "begun elsewhere"]
    group.copies = Ranks(2).each[0]
    assert isinstance(group.begin_sum(fits), CopiedSum)
    assert [group.begin_sum(one) for one in (stored, larger)] == [None, "begun elsewhere"]
    assert group.begin_sum(torch.zeros(1, 6, device=DEVICE)) == "begun elsewhere", "rows are not of whole 16 bytes"
