"""`PeerCollectives`: sums and gathers of GPUs that write to each other's memory.

For the few kilobytes that a decoding step sums, NCCL takes several times as long as the link: two launches' worth of
latency, and a separate addition and norm after it.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from octavo.core.errors import ConfigError
from octavo.device.transfer import link_of
from octavo.parallel.collectives import (
    BeginningSums,
    Collectives,
    ExchangingRows,
    PendingSum,
    RankSum,
    ScatteringSums,
)
from octavo.parallel.copied_sums import CopiedSums, with_copies
from octavo.parallel.peer_memory import Inboxes, PeerAccessError, Share, Sizes, map_inboxes, raise_first

if TYPE_CHECKING:
    from octavo.device.ahead import Ahead
    from octavo.device.transfer import Graph

log = logging.getLogger(__name__)

PROGRAMS = 128
"""Of a launch at most. All must run at once, since they wait for other ranks'; the smallest supported chips have more
multiprocessors."""
SLOT = 4096
STORERS = 256
"""Programs that store rows: two of a multiprocessor, so that one sends while the other adds up."""
_ROOM = 64 << 20
"""Bytes of rows that a rank can be sent at a time, by all others together. Larger sums take several launches."""
_SUMMED = (torch.bfloat16, torch.float16, torch.float32)
_LONGEST_ROW = 16384
_TRIED_ROWS = (1, 4, 16, 64, 256, 1024, 4096, 8192)
"""Rows of 16 KiB, for which ways are timed."""
_SCATTERED = 1 << 20
"""Bytes of a sum above which ranks receive only their own parts."""
_TRIAL_READS = 1 << 22
"""Tries to read a cell before the trial fails, which takes seconds."""
_REPEATS = 10


@dataclass(frozen=True, slots=True)
class Limits:
    """Which way is the fastest for a tensor's bytes. All others go through the process group.

    Attributes:
        one_shot: of those that go in cells, up to which in one shot; larger ones in two.
        cells: up to which cells serve what is gathered, and sums that are not of stored rows.
        stored_from, stored: above which and up to which rows are stored.
    """

    one_shot: int
    cells: int
    stored_from: int = 0
    stored: int = 0

    @property
    def most(self) -> int:
        """The most bytes that go through the memory of peers."""
        return max(self.cells, self.stored)


ALL_SIZES = Limits(64 << 10, 1 << 62)


class PeerCollectives:
    """`Collectives` through the memory of peers up to a size, and of other tensors through a process group.

    Args:
        others: for tensors that are larger, or not of whole words; None if there is nothing else.
        overlaps: launches may begin before the previous one ends, as from Hopper on.

    Attributes:
        copies: what sums beside computation; None for the process group.
    """

    def __init__(self, inboxes: Inboxes, others: Collectives | None, limits: Limits, *, overlaps: bool = False) -> None:
        self._inboxes, self._others, self.limits = inboxes, others, limits
        self._overlaps = overlaps
        self.copies: CopiedSums | None = None

    def all_reduce(self, x: Tensor) -> Tensor:
        sent = self._in_words(x)
        if self._stores(sent):
            return self._store(sent, torch.empty_like(sent), None)
        words = self._row_words(sent) if x.dtype in _SUMMED and x.nbytes <= self.limits.cells else 0
        if not words:
            return x if self._has_nothing(x) else self._rest.all_reduce(sent)
        out = torch.empty_like(sent)
        self._exchange(sent, out, None, words)
        return out if out.shape == x.shape else out[: x.numel()].view(x.shape)

    def all_gather(self, x: Tensor) -> Tensor:
        sent = self._in_words(x)
        words = self._row_words(sent) if x.nbytes <= self.limits.cells else 0
        if not words:
            nothing = self._has_nothing(x)
            return x.new_empty(self._inboxes.ranks, *x.shape) if nothing else self._rest.all_gather(sent)
        out = x.new_empty(self._inboxes.ranks, sent.nbytes // 4, dtype=torch.int32)
        self._launch(sent.flatten().view(torch.int32), out, None, words, gathers=True)
        parts: Tensor = out.view(x.dtype)[:, : x.numel()].unflatten(1, x.shape)
        return parts

    def all_to_all(self, x: Tensor, sent: Sequence[int], received: Sequence[int]) -> list[Tensor]:
        rest = self._rest
        assert isinstance(rest, ExchangingRows), "torch's process groups exchange rows"
        return rest.all_to_all(x, sent, received)

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """See `ScatteringSums`. A small sum goes to all ranks: the others' parts cost less than a second kind of
        launch."""
        rest = self._others
        if isinstance(rest, ScatteringSums) and x.nbytes > min(_SCATTERED, self.limits.most):
            return rest.reduce_scatter(x)
        return self.all_reduce(x.flatten(0, -2)).view(x.shape)[self._inboxes.rank]

    def summands(self, x: Tensor) -> PeerSum | None:
        """Return the sum of x [T, H] over ranks, not computed yet, so that a norm's launch can compute it; None if
        that launch can't."""
        x = x.contiguous()
        fits = x.dtype in _SUMMED and x.nbytes <= self.limits.cells and x.dim() == 2
        return PeerSum(self, x) if self._stores(x) or (fits and self._row_words(x) == _words(x) > 0) else None

    def most_hidden_bytes(self) -> int:
        return 0 if self.copies is None else self.copies.room

    def begin_sum(self, x: Tensor) -> RankSum | PendingSum | None:
        """See `BeginningSums`. Beside computation NCCL loses what it takes of that, so it is only for what would be its
        own anyway."""
        x, others = x.contiguous(), self._others
        begun = self.copies.begin(x) if self.copies is not None and _stores_rows(x) else None
        if begun is not None:
            return begun
        return others.begin_sum(x) if isinstance(others, BeginningSums) and self.summands(x) is None else None

    def sum_norm(self, x: Tensor, stream: Tensor, norm: tuple[Tensor, float], dtype: torch.dtype) -> Tensor:
        """Add the sum of x over ranks to the stream in place; return the RMS norm. See `RankSum`."""
        weight, eps = norm
        out = torch.empty_like(stream, dtype=dtype)
        if self._stores(x):
            return self._store(x, out, (stream, stream, weight, eps))
        self._exchange(x, out, (stream, stream, weight, eps), _words(x))
        return out

    @property
    def _rest(self) -> Collectives:
        if self._others is None:
            raise ConfigError("Ranks that share a GPU can't exchange tensors in this way: give each a GPU.")
        return self._others

    def _has_nothing(self, x: Tensor) -> bool:
        """Return whether x is empty, on all ranks, and nothing else is there to exchange it."""
        return self._others is None and x.numel() == 0

    def _in_words(self, x: Tensor) -> Tensor:
        """Return x, contiguous; with zeros behind it, as one row, if it is not of whole words and nothing else sends
        it."""
        if self._others is not None or x.nbytes % 4 == 0:
            return x.contiguous()
        return torch.nn.functional.pad(x.flatten(), (0, -x.nbytes % 4 // x.element_size()))

    def _row_words(self, x: Tensor) -> int:
        """Return the words of the rows in which x, contiguous, is sent; 0 if it can't be.

        They are rows of its own, or equal parts of them. Without either, rows have a power of two words, so that few
        kernels are compiled for many sizes, and the last one may be shorter.
        """
        words, slot, ranks = _words(x), self._inboxes.sizes.slot, self._inboxes.ranks
        if x.numel() == 0 or x.nbytes % 4:
            return 0
        least = -(-words // slot)
        for parts in range(least, 4 * least):
            if words % parts == 0 and words // parts >= ranks:
                return words // parts
        return min(slot, 1 << (max(x.nbytes // 4, ranks) - 1).bit_length())

    def _stores(self, x: Tensor) -> bool:
        """Return whether x is summed by storing its rows."""
        return self.limits.stored_from < x.nbytes <= self.limits.stored and _stores_rows(x)

    def _exchange(self, x: Tensor, out: Tensor, norm: tuple[Tensor, Tensor, Tensor, float] | None, words: int) -> None:
        self._launch(x, out, norm, words, two_shots=x.nbytes > self.limits.one_shot)

    def _store(self, x: Tensor, out: Tensor, norm: tuple[Tensor, Tensor, Tensor, float] | None) -> Tensor:
        """Sum x [T, H] by storing its rows, as many at a time as there is room for; return `out`."""
        most = self._inboxes.sizes.room // (x.shape[1] * x.element_size())
        for first in range(0, len(x), most):
            rows = slice(first, first + most)
            part = norm if norm is None else (norm[0][rows], norm[1][rows], *norm[2:])
            self._launch_stores(x[rows], out[rows], part)
        return out

    def _launch_stores(
        self,
        x: Tensor,
        out: Tensor,
        norm: tuple[Tensor, Tensor, Tensor, float] | None,
        *,
        patience: int = 0x7FFFFFFF,
    ) -> None:
        from octavo.parallel import triton_stores  # needs triton, which machines without a GPU may lack

        inboxes = self._inboxes
        triton_stores.launch(
            x,
            inboxes.rooms,
            inboxes.turns,
            out,
            norm,
            rank=inboxes.rank,
            room=inboxes.sizes.room,
            patience=patience,
            overlaps=self._overlaps,
        )

    def _launch(
        self,
        x: Tensor,
        out: Tensor,
        norm: tuple[Tensor, Tensor, Tensor, float] | None,
        words: int,
        *,
        two_shots: bool = False,
        gathers: bool = False,
        patience: int = 0x7FFFFFFF,
    ) -> None:
        from octavo.parallel.triton_peers import launch  # needs triton, which machines without a GPU may lack

        inboxes = self._inboxes
        launch(
            x,
            inboxes.cells,
            inboxes.counts,
            out,
            norm,
            rank=inboxes.rank,
            words=words,
            slot=inboxes.sizes.slot,
            two_shots=two_shots,
            gathers=gathers,
            patience=patience,
            overlaps=self._overlaps,
        )

    def launch_sums(self, x: Tensor, norm: tuple[Tensor, Tensor, float] | None = None) -> None:
        """Launch the kernels of all sums of tensors like x [T, H], which need no values: for compiling them ahead.

        Args:
            norm: that follows a sum: the stream [T, H], the norm's weight and epsilon.
        """
        words, limits = self._row_words(x), self.limits
        ways = [*([False] if limits.one_shot else []), *([True] if limits.cells > limits.one_shot else [])]
        for two_shots in ways if words else ():
            self._launch(x, torch.empty_like(x), None, words, two_shots=two_shots)
            if norm is not None and words == _words(x):
                stream, weight, eps = norm
                following = stream, stream, weight, eps
                self._launch(x, torch.empty_like(stream, dtype=x.dtype), following, words, two_shots=two_shots)
        if limits.stored and _stores_rows(x):
            self._launch_stores(x, torch.empty_like(x), None)
            if norm is not None:
                stream, weight, eps = norm
                self._launch_stores(x, torch.empty_like(stream, dtype=x.dtype), (stream, stream, weight, eps))
        if self.copies is not None and _stores_rows(x):
            self.copies.launch_sums(x, norm)

    def launch_gather(self, x: Tensor) -> None:
        """Launch the kernel that gathers tensors like x, which needs no values: for compiling it ahead."""
        if self.limits.cells and (words := self._row_words(x)):
            sent = x.view(torch.int32)
            self._launch(sent, torch.empty_like(sent), None, words, gathers=True)

    # At start

    def problem(self) -> str:
        """Compute known sums in all ways; return what is wrong with the results, or an empty string."""
        rank, ranks, device = self._inboxes.rank, self._inboxes.ranks, self._inboxes.counts.device
        base = torch.arange(3 * SLOT, device=device).view(3, SLOT) % 64
        each = [(base + 3 * number).float() for number in range(ranks)]
        x, expected = each[rank], torch.stack(each).sum(0)
        for two_shots in (False, True):
            out = torch.full_like(x, -1.0)
            self._launch(x, out, None, SLOT, two_shots=two_shots, patience=_TRIAL_READS)
            if not torch.equal(out, expected):
                return f"got wrong sums in {1 + two_shots} shots"
        out = torch.full_like(x, -1.0)
        self._launch_stores(x, out, None, patience=_TRIAL_READS)
        if not torch.equal(out, expected):
            return "got wrong sums of stored rows"
        found = torch.full((ranks, 3, SLOT), -1, dtype=torch.int32, device=device)
        self._launch(x.view(torch.int32), found, None, SLOT, gathers=True, patience=_TRIAL_READS)
        return "" if torch.equal(found.view(torch.float32), torch.stack(each)) else "gathered wrong values"

    def times(self) -> dict[str, dict[int, float]]:
        """Return the milliseconds of a recorded sum, for each way and number of bytes."""
        found: dict[str, dict[int, float]] = {"one shot": {}, "two shots": {}, "stored": {}, "others": {}}
        for rows in _TRIED_ROWS:
            x = torch.ones(rows, 2 * SLOT, dtype=torch.bfloat16, device=self._inboxes.counts.device)
            out = torch.empty_like(x)
            ways: dict[str, Callable[[], object]] = {
                "one shot": partial(self._launch, x, out, None, SLOT),
                "two shots": partial(self._launch, x, out, None, SLOT, two_shots=True),
                "stored": partial(self._store, x, out, None),
                "others": partial(self._rest.all_reduce, x),
            }
            for name, way in ways.items():
                found[name][x.nbytes] = _recorded_ms(way, x.device)
        return found


class PeerSum:
    """A `RankSum`."""

    def __init__(self, collectives: PeerCollectives, x: Tensor) -> None:
        self._collectives, self._x = collectives, x

    def total(self) -> Tensor:
        return self._collectives.all_reduce(self._x)

    def normed_with(self, stream: Tensor, norm: tuple[Tensor, float], dtype: torch.dtype) -> Tensor:
        return self._collectives.sum_norm(self._x, stream, norm, dtype)


def compile_trials(ranks: int) -> Ahead:
    """Start to compile what `with_peers` launches; return the handle to wait for.

    The ranks of a first start would otherwise compile one kernel after the other.
    """
    from octavo.device.ahead import Ahead, target_of  # needs triton

    device = torch.device("cuda", torch.cuda.current_device())
    overlaps = torch.cuda.get_device_capability(device) >= (9, 0)
    inboxes = Inboxes(0, torch.empty(ranks, dtype=torch.int64, device=device), sizes_for(ranks))
    made = PeerCollectives(inboxes, None, dataclasses.replace(ALL_SIZES, stored=ALL_SIZES.cells), overlaps=overlaps)
    ahead = Ahead(target_of(device))
    with ahead.collecting():
        tried = torch.empty(1, SLOT, device=device)
        made.launch_sums(tried)
        made.launch_gather(tried)
        made.launch_sums(torch.empty(1, 2 * SLOT, dtype=torch.bfloat16, device=device))
    return ahead


def with_peers(rank: int, share: Share, others: Collectives | None, *, later: bool = False) -> Collectives | None:
    """Return collectives through the memory of peers, if all ranks can use them and get right results; else `others`.

    Every rank must call it. With `others`, the sizes up to which each way is used are those that are fastest here.

    Args:
        later: `begin_sum` is used.
    """
    try:
        inboxes = map_inboxes(rank, share, sizes_for)
        made = PeerCollectives(inboxes, others, ALL_SIZES, overlaps=torch.cuda.get_device_capability() >= (9, 0))
        nothing = torch.empty(0, SLOT, device="cuda")
        made._launch(nothing, nothing, None, SLOT)
        made._launch_stores(nothing, nothing, None)
        share("compiled", b"")
        raise_first(share("tried", made.problem().encode()))
    except (PeerAccessError, OSError, ImportError) as error:
        if rank == 0:
            log.warning("GPUs add up through NCCL alone, since they can't write to each other's memory: %s", error)
        return others
    if others is not None:
        made.limits = limits_of([json.loads(one) for one in share("times", json.dumps(made.times()).encode())])
        if rank == 0:
            log.info(
                "sums over ranks: rows stored from %d to %d KiB; else one shot to %d KiB, two to %d KiB, then NCCL",
                *in_kib(made.limits),
            )
    if later:
        made.copies = with_copies(rank, inboxes.ranks, share)
    return made


def alike(made: Collectives, others: Collectives, share: Share) -> Collectives:
    """Return collectives that sum in the same way in several groups of ranks, whose results must have the same bits.

    Args:
        made: the result of `with_peers` in this group.
        share: exchanges data with the ranks of the same number in other groups.
    """
    own = dataclasses.astuple(made.limits) if isinstance(made, PeerCollectives) else None
    found = [json.loads(one) for one in share("limits", json.dumps(own).encode())]
    if not isinstance(made, PeerCollectives) or None in found:
        return others
    made.limits = Limits(*map(min, zip(*found, strict=True)))
    return made


def in_kib(limits: Limits) -> list[int]:
    return [size >> 10 for size in (limits.stored_from, limits.stored, limits.one_shot, limits.cells)]


def limits_of(times: list[Mapping[str, Mapping[str, float]]]) -> Limits:
    """Return where each way is the fastest, from all ranks' times: way -> bytes (as text) -> milliseconds.

    They lose least against the fastest way at each size, together for all sizes: one time that deviates changes little.
    All ranks get the same limits, since they must take the same way.
    """
    sizes = sorted(int(size) for size in times[0]["others"])
    total = {way: [sum(one[way][str(size)] for one in times) for size in sizes] for way in times[0]}
    bounds, places = [0, *sizes], range(len(sizes) + 1)

    def least(ways: Sequence[str], cuts: Iterable[tuple[int, ...]]) -> tuple[int, ...]:
        """Return the places between sizes at which one way follows the other with the least loss."""
        best = [min(total[way][i] for way in ways) for i in range(len(sizes))]

        def loss(cut: tuple[int, ...]) -> float:
            spans = zip(ways, itertools.pairwise((0, *cut, len(sizes))), strict=True)
            return sum((total[way][i] / best[i] for way, span in spans for i in range(*span)), 0.0)

        return min(cuts, key=loss)

    (one_shot,) = least(("one shot", "two shots"), itertools.product(places))
    total["cells"] = total["one shot"][:one_shot] + total["two shots"][one_shot:]
    (cells,) = least(("cells", "others"), itertools.product(places))
    total["rest"] = total["cells"][:cells] + total["others"][cells:]
    first, last = least(("rest", "stored", "rest"), itertools.combinations_with_replacement(places, 2))
    stored = (bounds[first], bounds[last]) if first < last else (0, 0)
    return Limits(min(bounds[one_shot], bounds[cells]), bounds[cells], *stored)


def sizes_for(ranks: int) -> Sizes:
    """Return the sizes of the memory that each of several ranks receives in."""
    return Sizes(PROGRAMS, SLOT, STORERS, _ROOM // max(2, ranks) // 16 * 16)


def _stores_rows(x: Tensor) -> bool:
    """Return whether rows like those of x can be stored."""
    if x.dim() != 2 or x.dtype not in _SUMMED:
        return False
    width = x.shape[1]
    return width * x.element_size() % 16 == 0 and width <= _LONGEST_ROW


def _words(x: Tensor) -> int:
    """Return the 32-bit words of a row of x; 0 if they are not whole."""
    size = x.shape[-1] * x.element_size()
    return 0 if size % 4 else size // 4


def _recorded_ms(launch: Callable[[], object], device: torch.device) -> float:
    """Return the milliseconds of a launch, repeated in a graph: the best of three replays."""
    link = link_of(device)
    recorder = link.recorder()
    assert recorder is not None, "GPUs record graphs"

    def repeat() -> None:
        for _ in range(_REPEATS):
            launch()

    launch()
    link.synchronize()
    graph: Graph = recorder.record(repeat)
    graph.replay()
    best = float("inf")
    for _ in range(3):
        begin = link.event()
        graph.replay()
        end = link.event()
        assert begin is not None
        assert end is not None
        link.synchronize()
        best = min(best, begin.elapsed_time(end) / _REPEATS)
    return best
