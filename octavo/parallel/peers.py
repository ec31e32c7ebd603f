"""`PeerCollectives`: sums and gathers of GPUs that write to each other's memory.

For the few kilobytes that a decoding step sums, NCCL takes several times as long as the link: two launches' worth of
latency, and a separate addition and norm after it.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from octavo.core.errors import ConfigError
from octavo.device.transfer import link_of
from octavo.parallel.collectives import BeginningSums, Collectives, ExchangingRows, PendingSum, ScatteringSums
from octavo.parallel.peer_memory import Inboxes, PeerAccessError, Share, map_inboxes, raise_first

if TYPE_CHECKING:
    from octavo.device.ahead import Ahead
    from octavo.device.transfer import Graph

log = logging.getLogger(__name__)

PROGRAMS = 128
"""Of a launch at most. All must run at once, since they wait for other ranks'; the smallest supported chips have more
multiprocessors."""
SLOT = 4096
_SUMMED = (torch.bfloat16, torch.float16, torch.float32)
_TRIED_ROWS = (1, 4, 16, 64, 256, 1024)
"""Rows of 16 KiB, for which ways are timed."""
_TRIAL_READS = 1 << 22
"""Tries to read a cell before the trial fails, which takes seconds."""
_REPEATS = 10


@dataclass(frozen=True, slots=True)
class Limits:
    """Bytes of a tensor up to which a way is the fastest: one shot, then two shots, then that of the process group."""

    one_shot: int
    two_shots: int


ALL_SIZES = Limits(64 << 10, 1 << 62)


class PeerCollectives:
    """`Collectives` through the memory of peers up to a size, and of other shapes through a process group.

    Args:
        others: for tensors that are larger, or not of whole words; None if there is nothing else.
        overlaps: launches may begin before the previous one ends, as from Hopper on.
    """

    def __init__(self, inboxes: Inboxes, others: Collectives | None, limits: Limits, *, overlaps: bool = False) -> None:
        self._inboxes, self._others, self.limits = inboxes, others, limits
        self._overlaps = overlaps

    def all_reduce(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        words = self._row_words(x) if x.dtype in _SUMMED and x.nbytes <= self.limits.two_shots else 0
        if not words:
            return self._rest.all_reduce(x)
        out = torch.empty_like(x)
        self._exchange(x, out, None, words)
        return out

    def all_gather(self, x: Tensor) -> list[Tensor]:
        x = x.contiguous()
        words = self._row_words(x) if x.nbytes <= self.limits.two_shots else 0
        if not words:
            return self._rest.all_gather(x)
        ranks = self._inboxes.ranks
        out = x.new_empty(ranks, x.nbytes // 4, dtype=torch.int32)
        self._launch(x.view(torch.int32), out, None, words, gathers=True)
        return list(out.view(x.dtype).view(ranks, *x.shape))

    def all_to_all(self, x: Tensor, sent: Sequence[int], received: Sequence[int]) -> list[Tensor]:
        rest = self._rest
        assert isinstance(rest, ExchangingRows), "torch's process groups exchange rows"
        return rest.all_to_all(x, sent, received)

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """See `ScatteringSums`. A small sum goes to all ranks: the others' parts cost less than a second kind of
        launch."""
        rest = self._others
        if isinstance(rest, ScatteringSums) and x.nbytes > self.limits.two_shots:
            return rest.reduce_scatter(x)
        return self.all_reduce(x)[self._inboxes.rank]

    def summands(self, x: Tensor) -> PeerSum | None:
        """Return the sum of x [T, H] over ranks, not computed yet, so that a norm's launch can compute it; None if
        that launch can't."""
        x = x.contiguous()
        fits = x.dtype in _SUMMED and x.nbytes <= self.limits.two_shots and x.dim() == 2
        return PeerSum(self, x) if fits and self._row_words(x) == _words(x) > 0 else None

    def begin_sum(self, x: Tensor) -> PendingSum | None:
        others = self._others
        return others.begin_sum(x) if isinstance(others, BeginningSums) else None

    def sum_norm(self, x: Tensor, stream: Tensor, norm: tuple[Tensor, float], dtype: torch.dtype) -> Tensor:
        """Add the sum of x over ranks to the stream in place; return the RMS norm. See `RankSum`."""
        weight, eps = norm
        out = torch.empty_like(stream, dtype=dtype)
        self._exchange(x, out, (stream, stream, weight, eps), _words(x))
        return out

    @property
    def _rest(self) -> Collectives:
        if self._others is None:
            raise ConfigError("Ranks that share a GPU can't exchange tensors of this shape: give each a GPU.")
        return self._others

    def _row_words(self, x: Tensor) -> int:
        """Return the words of the rows in which x is sent, rows of its own or parts of them; 0 if it can't be."""
        words = _words(x)
        if x.numel() == 0 or words == 0:
            return 0
        least = -(-words // self._inboxes.slot)
        each = next((words // parts for parts in range(least, words) if words % parts == 0), words)
        return each if self._inboxes.ranks <= each <= self._inboxes.slot else 0

    def _exchange(self, x: Tensor, out: Tensor, norm: tuple[Tensor, Tensor, Tensor, float] | None, words: int) -> None:
        self._launch(x, out, norm, words, two_shots=x.nbytes > self.limits.one_shot)

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
            inboxes.addresses,
            inboxes.counts,
            out,
            norm,
            rank=inboxes.rank,
            words=words,
            slot=inboxes.slot,
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
        ways = [*([False] if limits.one_shot else []), *([True] if limits.two_shots > limits.one_shot else [])]
        for two_shots in ways if words else ():
            self._launch(x, torch.empty_like(x), None, words, two_shots=two_shots)
            if norm is not None and words == _words(x):
                stream, weight, eps = norm
                following = stream, stream, weight, eps
                self._launch(x, torch.empty_like(stream, dtype=x.dtype), following, words, two_shots=two_shots)

    def launch_gather(self, x: Tensor) -> None:
        """Launch the kernel that gathers tensors like x, which needs no values: for compiling it ahead."""
        if self.limits.two_shots and (words := self._row_words(x)):
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
        found = torch.full((ranks, 3, SLOT), -1, dtype=torch.int32, device=device)
        self._launch(x.view(torch.int32), found, None, SLOT, gathers=True, patience=_TRIAL_READS)
        return "" if torch.equal(found.view(torch.float32), torch.stack(each)) else "gathered wrong values"

    def times(self) -> dict[str, dict[int, float]]:
        """Return the milliseconds of a recorded sum, for each way and number of bytes."""
        found: dict[str, dict[int, float]] = {"one shot": {}, "two shots": {}, "others": {}}
        for rows in _TRIED_ROWS:
            x = torch.ones(rows, 2 * SLOT, dtype=torch.bfloat16, device=self._inboxes.counts.device)
            out = torch.empty_like(x)
            ways: tuple[tuple[str, Callable[[], object]], ...] = (
                ("one shot", partial(self._launch, x, out, None, SLOT)),
                ("two shots", partial(self._launch, x, out, None, SLOT, two_shots=True)),
                ("others", partial(self._rest.all_reduce, x)),
            )
            for name, way in ways:
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
    addresses = torch.empty(ranks, dtype=torch.int64, device=device)
    inboxes = Inboxes(0, addresses, torch.empty(PROGRAMS, dtype=torch.int32, device=device), SLOT)
    made = PeerCollectives(inboxes, None, ALL_SIZES, overlaps=overlaps)
    ahead = Ahead(target_of(device))
    with ahead.collecting():
        tried = torch.empty(1, SLOT, device=device)
        made.launch_sums(tried)
        made.launch_gather(tried)
        made.launch_sums(torch.empty(1, 2 * SLOT, dtype=torch.bfloat16, device=device))
    return ahead


def with_peers(rank: int, share: Share, others: Collectives | None) -> Collectives | None:
    """Return collectives through the memory of peers, if all ranks can use them and get right results; else `others`.

    Every rank must call it. With `others`, the sizes up to which each way is used are those that are fastest here.
    """
    try:
        inboxes = map_inboxes(rank, share, PROGRAMS, SLOT)
        made = PeerCollectives(inboxes, others, ALL_SIZES, overlaps=torch.cuda.get_device_capability() >= (9, 0))
        made._launch(torch.empty(0, SLOT, device="cuda"), torch.empty(0, device="cuda"), None, SLOT)
        share("compiled", b"")
        raise_first(share("tried", made.problem().encode()))
    except (PeerAccessError, OSError, ImportError) as error:
        if rank == 0:
            log.warning("GPUs add up through NCCL alone, since they can't write to each other's memory: %s", error)
        return others
    if others is not None:
        made.limits = limits_of([json.loads(one) for one in share("times", json.dumps(made.times()).encode())])
        if rank == 0:
            log.info("sums over ranks: one shot to %d KiB, two shots to %d KiB, then NCCL", *in_kib(made.limits))
    return made


def alike(made: Collectives, others: Collectives, share: Share) -> Collectives:
    """Return collectives that sum in the same way in several groups of ranks, whose results must have the same bits.

    Args:
        made: the result of `with_peers` in this group.
        share: exchanges data with the ranks of the same number in other groups.
    """
    own = [made.limits.one_shot, made.limits.two_shots] if isinstance(made, PeerCollectives) else None
    found = [json.loads(one) for one in share("limits", json.dumps(own).encode())]
    if not isinstance(made, PeerCollectives) or None in found:
        return others
    made.limits = Limits(*map(min, zip(*found, strict=True)))
    return made


def in_kib(limits: Limits) -> tuple[int, int]:
    return limits.one_shot >> 10, limits.two_shots >> 10


def limits_of(times: list[Mapping[str, Mapping[str, float]]]) -> Limits:
    """Return where one way becomes faster than the next, from all ranks' times: way -> bytes (as text) -> milliseconds.

    All ranks get the same limits, since they must take the same way.
    """
    sizes = sorted(int(size) for size in times[0]["others"])
    total = {way: {size: sum(one[way][str(size)] for one in times) for size in sizes} for way in times[0]}

    def last(better: str, worse: str) -> int:
        """The size up to which one way is better, without a gap."""
        limit = 0
        for size in sizes:
            if total[better][size] >= total[worse][size]:
                break
            limit = size
        return limit

    best = {size: min(total["one shot"][size], total["two shots"][size]) for size in sizes}
    most = 0
    for size in sizes:
        if best[size] >= total["others"][size]:
            break
        most = size
    return Limits(min(last("one shot", "two shots"), most), most)


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
