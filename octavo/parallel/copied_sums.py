"""Sums over GPUs whose rows copy engines move while the multiprocessors compute something else.

When a product is done, the copy engine writes its rows into the room that each other rank has for them, then the number
of the sum as a flag. The norm that follows, half a layer of another part of the step later, waits for the flags of the
others, adds up its own rows and those in its room, and adds the residual. Sums are in float32 and in the order of
ranks, so all ranks have the same bits.

Room of a rank: SLOTS slots, used in turns, of [ranks - 1, ROOM] bytes for the rows of each other rank; then a flag for
each, int32.

**When a slot is free.** All ranks begin and finish the same sums in the same order, on one computing stream each. A
rank may write sum n into a slot of another one once that has read the slot's previous sum p there. It knows so from a
flag: the copies of a sum m wait for all that was launched before them on the computing stream. So if p was finished
before m was begun (on all ranks), the flag of m says that its sender has read p; and a rank that has finished m before
it begins n has waited for all flags of m. Hence the rule: note at the end of p the number of the next sum to begin, m;
the slot is free when a sum of this number or a later one has been finished. What does not follow the rule is refused,
by all ranks alike, and summed in another way.

With two parts of a step in turns, two sums are on their way: when n begins, the last one finished is n - 2. The next
to begin after the end of p is p + 2. So n - 2 must be at least p + 2: four slots. At most three sums may be on their
way: then m is at most p + 3, so slots become free again once all are finished. With four, m would be p + 4, which waits
for the slot itself.

On each rank, copies and flags of a sum are launched before what waits for others', so ranks don't wait in a circle.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from octavo.parallel.peer_memory import PeerAccessError, Share, map_memory, raise_first

log = logging.getLogger(__name__)

SLOTS = 4
MOST_RANKS = 4
"""Each rank sends all its rows to each other one. With eight, that takes longer than half a layer."""
_ROOM = 64 << 20
"""Bytes of a slot, for the rows of all other ranks: of 4,096 tokens of a model 8,192 wide, of two ranks."""
_TRIED = (8, 1024)


class Lane(Protocol):
    """A stream for copies to other ranks, beside the stream that computes. Nothing blocks."""

    def follow(self) -> None:
        """Have what is copied later wait for all computation that is launched by now."""
        ...

    def copy(self, x: Tensor, target: int) -> None:
        """Copy x, contiguous, to an address of another rank's memory."""
        ...

    def signal(self, flag: int, number: int) -> None:
        """Set a flag in another rank's memory after all copies so far."""
        ...

    def mark(self) -> Any:
        """Return the end of all copies so far."""
        ...

    def await_flag(self, flag: int, number: int) -> None:
        """Have computation that is launched later wait until a flag of this rank is the number or a later one."""
        ...

    def await_mark(self, mark: Any) -> None:
        """Have computation that is launched later wait for the end of copies."""
        ...


class CopiedSums:
    """Sums of one rank. All ranks must begin and finish the same ones in the same order.

    Args:
        areas: addresses of each rank's room, of zeros at first (`area_bytes`).

    Attributes:
        room: bytes of a tensor at most; a multiple of 16.
    """

    def __init__(self, rank: int, areas: Sequence[int], room: int, lane: Lane, device: torch.device) -> None:
        self._rank, self._areas, self.room, self._lane = rank, areas, room, lane
        self._rooms = torch.tensor(areas, dtype=torch.int64, device=device)
        self._others = [(rank + i) % len(areas) for i in range(1, len(areas))]
        self._begun = self._finished = self._open = 0
        self._free_after: list[int | None] = [0] * SLOTS

    def begin(self, x: Tensor) -> CopiedSum | None:
        """Begin to sum x [T, H], contiguous and unchanged until the end; None if it must be summed in another way.
        Rows are of whole 16 bytes."""
        number = self._begun + 1
        slot = number % SLOTS
        free_after = self._free_after[slot]
        busy = free_after is None or free_after > self._finished or self._open == SLOTS - 1
        if busy or not 0 < x.nbytes <= self.room:
            return None
        self._open += 1
        self._begun, self._free_after[slot] = number, None
        lane = self._lane
        lane.follow()
        for other in self._others:
            lane.copy(x, self._rows_address(self._rank, other, slot))
            lane.signal(self._flag_address(self._rank, other), number)
        return CopiedSum(self, x, number, lane.mark())

    def finish(
        self, x: Tensor, number: int, mark: Any, out: Tensor, norm: tuple[Tensor, Tensor, Tensor, float] | None
    ) -> Tensor:
        """Finish a sum; see `launch` in `triton_copies.py`. Return `out`."""
        lane, slot = self._lane, number % SLOTS
        for other in self._others:
            lane.await_flag(self._flag_address(other, self._rank), number)
        lane.await_mark(mark)  # what is launched after this may get the memory of x
        self._launch(x, out, norm, slot)
        self._free_after[slot] = self._begun + 1
        self._finished = max(self._finished, number)
        self._open -= 1
        return out

    def _launch(self, x: Tensor, out: Tensor, norm: tuple[Tensor, Tensor, Tensor, float] | None, slot: int) -> None:
        from octavo.parallel.triton_copies import launch  # needs triton, which machines without a GPU may lack

        launch(x, self._rooms, out, norm, rank=self._rank, slot=slot, room=self.room)

    def launch_sums(self, x: Tensor, norm: tuple[Tensor, Tensor, float] | None) -> None:
        """See `PeerCollectives.launch_sums`."""
        self._launch(x, torch.empty_like(x), None, 0)
        if norm is not None:
            stream, weight, eps = norm
            self._launch(x, torch.empty_like(stream, dtype=x.dtype), (stream, stream, weight, eps), 0)

    def _rows_address(self, rank: int, of: int, slot: int) -> int:
        """Return where the rows of a rank are in the room of another one."""
        return self._areas[of] + (slot * len(self._others) + _place(rank, of)) * self.room

    def _flag_address(self, rank: int, of: int) -> int:
        return self._areas[of] + SLOTS * len(self._others) * self.room + 4 * _place(rank, of)

    def flags(self) -> list[int]:
        """Return the addresses of this rank's flags."""
        return [self._flag_address(other, self._rank) for other in self._others]


class CopiedSum:
    """A `RankSum` whose rows are on their way."""

    def __init__(self, sums: CopiedSums, x: Tensor, number: int, mark: Any) -> None:
        self._sums, self._x, self._number, self._mark = sums, x, number, mark

    def total(self) -> Tensor:
        return self._sums.finish(self._x, self._number, self._mark, torch.empty_like(self._x), None)

    def normed_with(self, stream: Tensor, norm: tuple[Tensor, float], dtype: torch.dtype) -> Tensor:
        out = torch.empty_like(stream, dtype=dtype)
        return self._sums.finish(self._x, self._number, self._mark, out, (stream, stream, *norm))


def area_bytes(ranks: int, room: int) -> int:
    """Return the bytes of the memory that a rank receives in."""
    return (ranks - 1) * (SLOTS * room + 4)


def with_copies(rank: int, ranks: int, share: Share) -> CopiedSums | None:
    """Return sums by the current GPU's copy engines, if all ranks can use them and get right results. Every rank must
    call it."""
    if ranks > MOST_RANKS:
        return None
    from octavo.parallel.copy_lane import CopyLane

    room = _ROOM // (ranks - 1) // 16 * 16
    try:
        lane = CopyLane()
        areas = map_memory(rank, share, lambda ranks: area_bytes(ranks, room), "copies: ")
        made = CopiedSums(rank, areas, room, lane, torch.device("cuda", torch.cuda.current_device()))
        _try_out(made, lane.flag, rank, ranks, share)
    except (PeerAccessError, AttributeError) as error:
        if rank == 0:
            log.info("the copy engines don't move what steps in two parts sum: %s", error)
        return None
    return made


def _try_out(made: CopiedSums, flag: Any, rank: int, ranks: int, share: Share) -> None:
    """Compute known sums in all slots, twice. Raise PeerAccessError on all ranks if one gets a wrong result.

    Only the first sum can miss its flags: their arrival is checked on the host, since a stream would wait for ever.
    """
    device = torch.device("cuda", torch.cuda.current_device())
    base = torch.arange(_TRIED[0] * _TRIED[1], device=device).view(_TRIED) % 64
    problem = ""
    begun = None
    try:
        begun = made.begin((base + rank).bfloat16())
        for address in made.flags():
            flag(address)  # waits for the own copies
    except PeerAccessError as error:
        problem = str(error)
    raise_first(share("copies: sent", problem.encode()))
    missing = any(flag(address) != 1 for address in made.flags())
    raise_first(share("copies: arrived", b"got no flag" if missing else b""))
    wrong = False
    for turn in range(2 * SLOTS):
        expected = ranks * (base + turn) + sum(range(ranks))
        wrong |= begun is None or not torch.equal(begun.total(), expected.bfloat16())
        begun = made.begin((base + turn + 1 + rank).bfloat16())
    wrong |= begun is None
    if begun is not None:
        begun.total()  # so that its slot is free again
    raise_first(share("copies: summed", b"got wrong sums of copied rows" if wrong else b""))


def _place(rank: int, of: int) -> int:
    """Return the place of a rank among the others of another one."""
    return rank - (rank > of)
