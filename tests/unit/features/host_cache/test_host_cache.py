"""The engine half: what it has the worker half drop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any, cast

import pytest

from octavo.features.host_cache.engine import HostCache
from octavo.features.host_cache.index import Link
from octavo.schedule.pages import Pages

A, B, C, D = b"a", b"b", b"c", b"d"


class Rank:
    """Stands for `Pages`: ranks with places, which may not answer."""

    awake = True

    def __init__(self, *places: int, kept: Sequence[Sequence[Link]] = ()) -> None:
        self.places = places
        self.kept = kept or [[] for _ in places]
        self.calls: list[tuple[str, Mapping[str, Any]]] = []
        self.late: list[Future[list[Any]]] = []

    def call(self, method: str, args: Mapping[str, Any]) -> Future[list[Any]]:
        self.calls.append((method, args))
        answer: Future[list[Any]] = Future()
        if method in ("places", "kept"):
            answer.set_result([*(self.places if method == "places" else self.kept)])
        else:
            self.late.append(answer)
        return answer

    def dropped(self) -> list[bytes]:
        found = [page for method, args in self.calls if method == "drop" for page in args["pages"]]
        self.calls.clear()
        return found


def made(*places: int, links: bool = False, kept: Sequence[Sequence[Link]] = ()) -> tuple[HostCache, Rank]:
    hook, rank = HostCache(links=links), Rank(*places, kept=kept)
    hook.attach(cast("Pages", rank))
    assert hook.awaits
    hook.turn()
    assert not hook.awaits
    return hook, rank


def test_an_eighth_of_the_fewest_places_is_spare() -> None:
    hook, _ = made(32, 24, 40)
    assert hook.tier.index.capacity == 21


def test_what_has_to_go_is_dropped_before_the_next_step() -> None:
    hook, rank = made(3)
    hook.tier.stored([A, B, C, D], [b"", A, B, C])
    assert [hook.tier.holds(page) for page in (A, B, C, D)] == [True, True, True, False]
    hook.turn()
    hook.turn()
    assert rank.dropped() == [D]
    assert {metric.name: metric.values[""] for metric in hook.metrics()} == {
        "host_kv_blocks": 3,
        "host_kv_blocks_most": 3,
        "host_kv_blocks_dropped": 1,
    }


def test_pages_that_some_ranks_may_have_are_dropped_by_all() -> None:
    hook, rank = made(8)
    hook.tier.stored([A, B], [b"", A])
    hook.tier.not_stored([C])
    hook.tier.lost([A])
    hook.turn()
    assert rank.dropped() == [C, A]
    assert not hook.tier.holds(A)


@pytest.mark.parametrize("event", ["on_reset", "on_weights"])
def test_other_weights_and_a_reset_forget_all(event: str) -> None:
    hook, rank = made(8)
    hook.tier.stored([A, B], [b"", A])
    getattr(hook, event)()
    assert not hook.tier.holds(A)
    rank.awake = False
    hook.turn()
    assert rank.dropped() == [], "asleep"
    rank.awake = True
    hook.turn()
    assert rank.dropped() == [A, B]


def test_what_could_not_be_dropped_is_dropped_later() -> None:
    hook, rank = made(8)
    hook.tier.not_stored([A])
    hook.turn()
    assert rank.dropped() == [A]
    rank.late.pop().set_exception(RuntimeError("a rank is slow"))
    hook.turn()
    assert rank.dropped() == [A]


def test_ranks_that_could_not_be_asked_are_asked_again() -> None:
    hook, rank = HostCache(), Rank()
    hook.attach(cast("Pages", rank))
    with pytest.raises(ValueError, match="min"):
        hook.turn()
    rank.places, rank.kept = (16,), [[]]
    hook.turn()
    assert hook.tier.index.capacity == 14


def test_pages_that_were_there_are_of_use_if_all_ranks_have_them_and_what_they_continue() -> None:
    chain = [(A, b""), (B, A), (C, B), (D, C)]
    hook, rank = made(8, 8, links=True, kept=[chain[::-1], chain])
    assert all(hook.tier.holds(page) for page in (A, B, C, D))
    hook, rank = made(8, 8, links=True, kept=[chain, [(A, b""), (C, B), (D, C)]])
    assert [hook.tier.holds(page) for page in (A, B, C, D)] == [True, False, False, False]
    hook.turn()
    assert sorted(rank.dropped()) == [B, C, D]


def test_what_was_there_and_finds_no_room_is_dropped() -> None:
    hook, rank = made(8, links=True, kept=[[(bytes([i]), bytes([i - 1]) if i else b"") for i in range(9)]])
    assert [hook.tier.holds(bytes([i])) for i in range(9)] == [True] * 7 + [False] * 2
    hook.turn()
    assert rank.dropped() == [bytes([8]), bytes([7])]


@pytest.mark.parametrize("links", [True, False])
def test_the_worker_half_notes_what_pages_continue_if_it_keeps_them(links: bool) -> None:
    hook, rank = made(8, links=links)
    hook.tier.stored([A, B], [b"", A])
    rank.calls.clear()
    hook.turn()
    hook.turn()
    assert rank.calls == ([("link", {"links": [(A, b""), (B, A)]})] if links else [])
