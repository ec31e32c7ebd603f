"""Sums in the memory of peers, against plain sums: in Triton's interpreter, and between processes on one GPU."""

from __future__ import annotations

import itertools
import os
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from octavo.parallel.collectives import RankSum
from octavo.parallel.copied_sums import CopiedSum
from octavo.parallel.peer_memory import Inboxes, PeerAccessError, Sizes
from octavo.parallel.peers import Limits, PeerCollectives, limits_of, sizes_for, with_peers

pytest.importorskip("triton")

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SLOT = 64
SIZES = Sizes(programs=3, slot=SLOT, storers=2, room=512)
ONE, TWO, STORED = Limits(1 << 40, 1 << 40), Limits(0, 1 << 40), Limits(0, 0, 0, 1 << 40)
Norm = tuple[Tensor, float]


class Ranks:
    """Several ranks' collectives in one process, whose launches run one after the other.

    Each launch is repeated until all have found what the others send: the first time they read what is not there yet.
    A program may make two exchanges in a launch; a third would overwrite the first, since nobody waits here.
    """

    def __init__(self, count: int, limits: Limits) -> None:
        self.memory = [torch.zeros(SIZES.total(count), dtype=torch.uint8, device=DEVICE) for _ in range(count)]
        addresses = torch.tensor([one.data_ptr() for one in self.memory], device=DEVICE)
        inboxes = [Inboxes(rank, addresses, SIZES) for rank in range(count)]
        self.counts = [count for one in inboxes for count in (one.counts, one.turns)]
        self.each = [Impatient(one, None, limits) for one in inboxes]

    def together(self, compute: Callable[[PeerCollectives, int], Any]) -> list[Any]:
        before = [one.clone() for one in self.counts]
        for _ in range(3):
            for one, count in zip(self.counts, before, strict=True):
                one.copy_(count)
            found = [compute(one, rank) for rank, one in enumerate(self.each)]
        return found


class Impatient(PeerCollectives):
    """Reads each cell a few times, so that it does not wait for launches that come later."""

    def _launch(self, *args: Any, **options: Any) -> None:
        super()._launch(*args, **options | {"patience": 2})

    def _launch_stores(self, *args: Any, **options: Any) -> None:
        super()._launch_stores(*args, **options | {"patience": 2})


def parts(count: int, *shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> list[Tensor]:
    """Return values whose sums no dtype rounds: Triton's interpreter truncates instead."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(-30, 31, shape, generator=generator).to(DEVICE, dtype) for _ in range(count)]


def noise(count: int, *shape: int, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(shape, generator=generator).to(DEVICE, dtype) for _ in range(count)]


def total(each: list[Tensor]) -> Tensor:
    """Add up in float32 and in the order of ranks."""
    found = each[0].float()
    for one in each[1:]:
        found = found + one.float()
    return found


@pytest.mark.parametrize("limits", [ONE, TWO], ids=["one shot", "two shots"])
@pytest.mark.parametrize(
    ("count", "shape", "dtype"),
    [
        (2, (5, 36), torch.bfloat16),
        (2, (1, 64), torch.float32),
        (3, (1, 22), torch.float16),
        (4, (1, 200), torch.float32),
        (4, (3, 1), torch.float32),
        (3, (1, 202), torch.bfloat16),
        (2, (5, 67), torch.float32),
        (2, (7, 3), torch.bfloat16),
    ],
    ids=[
        "bfloat16, more rows than programs",
        "float32",
        "three ranks, parts that are not equal",
        "rows in parts",
        "fewer words than ranks",
        "a prime number of words",
        "rows that are too long and can't be divided",
        "half a word at the end",
    ],
)
def test_sums(count: int, shape: tuple[int, ...], dtype: torch.dtype, limits: Limits) -> None:
    ranks = Ranks(count, limits)
    # Consecutive exchanges use different halves of the inboxes, the third the first one again.
    for seed in range(3 if count == 2 else 1):
        each = parts(count, *shape, dtype=dtype, seed=seed)
        expected = total(each).to(dtype)
        for found in ranks.together(lambda one, rank, each=each: one.all_reduce(each[rank])):
            assert torch.equal(found, expected)


@pytest.mark.parametrize(("count", "rows", "width"), [(2, 1, 16), (2, 13, 16), (3, 5, 24), (4, 2, 32)], ids=str)
def test_sums_of_stored_rows(count: int, rows: int, width: int) -> None:
    """Thirteen rows are stored in one launch of seven and six rows, in three and two groups of three."""
    ranks = Ranks(count, STORED)
    for seed in range(3):  # halves of the rooms take turns
        each = parts(count, rows, width, seed=seed)
        for found in ranks.together(lambda one, rank, each=each: one.all_reduce(each[rank])):
            assert torch.equal(found, total(each).bfloat16())


def test_more_stored_rows_than_there_is_room_for() -> None:
    """Two launches: both halves of the room. A third would overwrite the first, since nobody waits here."""
    ranks = Ranks(2, STORED)
    each = parts(2, 2 * SIZES.room // 32 - 3, 16)
    for found in ranks.together(lambda one, rank: one.all_reduce(each[rank])):
        assert torch.equal(found, total(each).bfloat16())


def test_stored_rows_are_of_whole_16_bytes() -> None:
    one = PeerCollectives(Ranks(2, STORED).each[0]._inboxes, Elsewhere(), STORED)
    for x in (torch.zeros(2, 6), torch.zeros(2, 2, 8), torch.zeros(2, 8, dtype=torch.int32)):
        assert torch.equal(one.all_reduce(x.to(DEVICE)), (x + 100).to(DEVICE))


@pytest.mark.parametrize("limits", [ONE, TWO, STORED], ids=["one shot", "two shots", "stored"])
@pytest.mark.parametrize("wide", [torch.bfloat16, torch.float32], ids=str)
def test_a_sum_with_the_stream_and_its_norm(wide: torch.dtype, limits: Limits) -> None:
    ranks = Ranks(2, limits)
    each, (stream,), (weight,) = parts(2, 5, 72), parts(1, 5, 72, dtype=wide, seed=1), parts(1, 72, seed=2)

    def compute(one: PeerCollectives, rank: int) -> tuple[Tensor, Tensor]:
        own, summands = stream.clone(), one.summands(each[rank])
        assert summands is not None
        return summands.normed_with(own, (weight, 1e-5), torch.bfloat16), own

    (first, *others), after = zip(*ranks.together(compute), strict=True)
    assert torch.equal(after[0], (stream.float() + total(each)).to(wide))
    norm = after[0].float() * torch.rsqrt(after[0].float().square().mean(-1, keepdim=True) + 1e-5) * weight.float()
    torch.testing.assert_close(first.float(), norm, rtol=1e-2, atol=1e-2)
    assert all(torch.equal(other, first) for other in others)
    assert torch.equal(after[1], after[0])


def test_gathers() -> None:
    ranks = Ranks(2, ONE)
    for dtype, width in itertools.product((torch.float32, torch.int64), (8, 72)):
        gather(ranks, [(one * 9).to(dtype) for one in parts(2, 2, width)])


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((1, 1), torch.float32),
        ((2, 3, 1), torch.int32),
        ((5, 67), torch.float32),
        ((2, 3), torch.bfloat16),
        ((7, 3), torch.bfloat16),
        ((3, 1), torch.uint8),
    ],
    ids=str,
)
def test_gathers_of_any_shape(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    ranks = Ranks(3, ONE)
    gather(ranks, [one.abs().to(dtype) for one in parts(3, *shape)])


def test_gathers_what_is_not_contiguous() -> None:
    gather(Ranks(2, ONE), [one.t() for one in parts(2, 5, 3)])


def gather(ranks: Ranks, each: list[Tensor]) -> None:
    for found in ranks.together(lambda one, rank: one.all_gather(each[rank])):
        assert all(torch.equal(mine, its) for mine, its in zip(found, each, strict=True))


def test_rows_are_divided_alike_for_many_sizes() -> None:
    """A kernel is compiled for each number of words in a row."""
    one = Ranks(2, ONE).each[0]
    assert {one._row_words(torch.empty(rows, 72)) for rows in range(1, 40)} == {36}
    assert {one._row_words(torch.empty(rows, 67)) for rows in range(1, 40)} == {SLOT}
    assert {one._row_words(torch.empty(2, rows, 1)) for rows in range(1, 40)} == {2, 4, 8, 16, 32, 64}


def test_nothing_is_exchanged_for_an_empty_tensor() -> None:
    ranks = Ranks(2, ONE)
    empty = torch.zeros(0, 8, device=DEVICE)
    assert ranks.each[0].all_reduce(empty).shape == empty.shape
    assert [one.shape for one in ranks.each[0].all_gather(empty)] == [empty.shape] * 2


class Elsewhere:
    """`Collectives` that say that they were asked."""

    def all_reduce(self, x: Tensor) -> Tensor:
        return x + 100

    def all_gather(self, x: Tensor) -> Tensor:
        return x[None] + 100


def test_what_is_too_large_or_not_of_whole_words_goes_another_way() -> None:
    ranks = Ranks(2, Limits(64, 128))
    one = PeerCollectives(ranks.each[0]._inboxes, Elsewhere(), Limits(64, 128))
    for x in (torch.zeros(3, 33), torch.zeros(1, 3, dtype=torch.bfloat16), torch.zeros(2, 8, dtype=torch.int64)):
        assert torch.equal(one.all_reduce(x.to(DEVICE)), (x + 100).to(DEVICE))
        assert one.summands(x.to(DEVICE)) is None
    assert one.summands(torch.zeros(1, 2 * SLOT, device=DEVICE)) is None, "a norm needs the whole row"


def times_of(one_shot: list[float], two_shots: list[float], stored: list[float], others: list[float]) -> Any:
    """Return times of sums of 1, 2, 4, ... bytes, by way."""
    ways = {"one shot": one_shot, "two shots": two_shots, "stored": stored, "others": others}
    return {way: {str(1 << i): time for i, time in enumerate(times)} for way, times in ways.items()}


def test_limits_are_where_another_way_becomes_faster() -> None:
    one, two, slow = [1.0, 3.0, 3.0], [2.0, 2.0, 2.0], [9.0, 9.0, 9.0]
    assert limits_of([times_of(one, two, slow, [9.0, 9.0, 2.5])] * 2) == Limits(1, 4)
    assert limits_of([times_of(one, two, slow, [9.0, 9.0, 0.5])]) == Limits(1, 2)
    assert limits_of([times_of(one, two, slow, [0.1, 0.1, 0.1])]) == Limits(0, 0)
    assert limits_of([times_of(one, two, [3.0, 1.0, 1.5], slow)]) == Limits(1, 4, 1, 4)
    assert limits_of([times_of(one, two, [3.0, 1.0, 1.5], [9.0, 9.0, 1.0])]) == Limits(1, 2, 1, 2)
    assert limits_of([times_of(one, two, [0.5, 1.0, 3.0], slow)]) == Limits(1, 4, 0, 2), "also the fewest bytes"
    others = [4.0, 9.0, 5.0]
    assert limits_of([times_of(one, two, [50.0] * 3, others)]) == Limits(1, 4)
    five = [5 * time for time in one], [5 * time for time in two], [50.0] * 3
    each = [times_of(one, two, [50.0] * 3, others), times_of(*five, others)]
    assert limits_of(each) == Limits(1, 2), "the time of all ranks counts"


def test_one_slow_measurement_does_not_rule_out_a_way() -> None:
    """As on two H200s, where a sum of 16 KiB once took longer in one shot than by stored rows."""
    one, two = [5.2, 4.5, 6.0, 11.0, 18.0, 30.0], [6.0, 6.0, 7.0, 11.2, 17.0, 29.0]
    stored, others = [5.1, 5.2, 6.1, 9.0, 11.6, 18.0], [9.6, 10.5, 11.5, 17.0, 30.0, 35.0]
    assert limits_of([times_of(one, two, stored, others)]) == Limits(8, 32, 4, 32)


def on_one_gpu(rank: int, folder: str) -> None:
    """One of two processes that exchange through files at the start, and through the GPU's memory then."""
    names = itertools.count()

    def share(name: str, data: bytes) -> list[bytes]:
        place = f"{next(names)}-{name}"
        part = Path(folder) / f"{rank}.part"
        part.write_bytes(data)
        part.rename(Path(folder) / f"{place}-{rank}")
        paths = [Path(folder) / f"{place}-{other}" for other in range(2)]
        while not all(path.exists() for path in paths):
            os.sched_yield()
        return [path.read_bytes() for path in paths]

    torch.cuda.set_device(0)
    made = with_peers(rank, share, None, later=True)
    assert isinstance(made, PeerCollectives), "the process does not reach the other's memory"
    results = []
    sizes = itertools.product((ONE, TWO, STORED), (1, 7, 200, 5000), (torch.bfloat16, torch.float32))
    for limits, rows, dtype in sizes:
        made.limits = limits
        each, (stream,), (weight,) = (
            noise(2, rows, 4096, dtype=dtype),
            parts(1, rows, 4096, dtype=dtype, seed=1),
            parts(1, 4096, dtype=dtype, seed=2),
        )
        assert torch.equal(made.all_reduce(each[rank]), total(each).to(dtype))
        made.limits = ONE
        gathered = made.all_gather(each[rank])
        made.limits = limits
        assert all(torch.equal(mine, its) for mine, its in zip(gathered, each, strict=True))
        summands = made.summands(each[rank])
        assert summands is not None
        normed = summands.normed_with(stream, (weight, 1e-5), dtype)
        results += [stream.cpu(), normed.cpu()]
    for limits, shape in itertools.product((ONE, TWO), ((4, 1), (7, 3), (2, 9014))):
        made.limits = limits
        each = noise(2, *shape)
        assert torch.equal(made.all_reduce(each[rank]), total(each).bfloat16())
        gathered = made.all_gather(each[rank])
        assert all(torch.equal(mine, its) for mine, its in zip(gathered, each, strict=True))
    for limits, rows in ((ONE, 4), (STORED, 4), (STORED, 700)):
        made.limits = limits
        x, kept = noise(2, rows, 4096)[rank], torch.zeros(rows, 4096, dtype=torch.bfloat16, device="cuda")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(3):
                kept += made.all_reduce(x)
        for _ in range(5):
            graph.replay()
        expected = torch.zeros_like(kept)
        for _ in range(15):
            expected += total(noise(2, rows, 4096)).bfloat16()
        assert torch.equal(kept, expected), "replays"
    results += copied_sums(made, rank)
    share("done", b"")
    torch.save(results, Path(folder) / f"results-{rank}.pt")


def copied_sums(made: PeerCollectives, rank: int) -> list[Tensor]:
    """Return norms and residual streams after copied sums, two in flight at a time, mixed with stored sums."""
    assert made.copies is not None, "copy engines don't reach the other's memory"
    made.limits, results, begun = STORED, [], deque[tuple[RankSum, Tensor]]()
    (weight,), (stream,) = parts(1, 4096, seed=2), parts(1, 4096, 4096, seed=1)
    for turn in range(40):
        rows = (4096, 1, 700)[turn % 3]
        each = [one * (turn % 5 + 1) for one in noise(2, rows, 4096)]
        one = made.begin_sum(each[rank] * 1)
        assert isinstance(one, CopiedSum)
        begun.append((one, total(each)))
        if len(begun) < 2:
            continue
        one, expected = begun.popleft()
        if turn % 2:
            assert torch.equal(one.total(), expected.bfloat16())
        else:
            own = stream[: len(expected)].clone()
            results += [one.normed_with(own, (weight, 1e-5), torch.bfloat16).cpu(), own.cpu()]
            assert torch.equal(own, (expected + stream[: len(expected)]).bfloat16())
            assert torch.equal(made.all_reduce(each[rank]), total(each).bfloat16())
    begun.popleft()[0].total()
    return results


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_two_processes_on_one_gpu(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(on_one_gpu, args=(str(tmp_path),), nprocs=2)
    first, second = (torch.load(tmp_path / f"results-{rank}.pt") for rank in range(2))
    assert all(torch.equal(mine, its) for mine, its in zip(first, second, strict=True))


def test_without_access_the_others_are_used(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def fail(*args: object) -> Inboxes:
        raise PeerAccessError("rank 1 can't map the memory of rank 0: peer access is not supported")

    monkeypatch.setattr("octavo.parallel.peers.map_inboxes", fail)
    others = Elsewhere()
    assert with_peers(0, lambda name, data: [data, data], others) is others
    assert "rank 1 can't map the memory of rank 0" in caplog.text


@pytest.mark.parametrize("ranks", range(2, 9))
def test_rooms_of_any_number_of_ranks_are_aligned(ranks: int) -> None:
    assert sizes_for(ranks).room % 16 == 0
    assert sizes_for(ranks).cells(ranks) % 16 == 0
