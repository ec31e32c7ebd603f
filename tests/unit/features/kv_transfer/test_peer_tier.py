"""Which pages are offered to whom, kept, and dropped."""

from __future__ import annotations

from typing import Any, cast

from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from octavo.features.kv_transfer.tier import PeerTier
from octavo.schedule.request import Request

PAGES = [bytes([i]) for i in range(12)]
some = st.lists(st.sampled_from(PAGES), unique=True, max_size=5)
requests = st.sampled_from([cast("Request", object()) for _ in range(3)])


class Tiers(RuleBasedStateMachine):
    """Against sets: the worker half has what it was given and not told to drop."""

    def __init__(self) -> None:
        super().__init__()
        self.tier = PeerTier(1.0)
        self.tier.capacity = 4
        self.offered: dict[Request, set[bytes]] = {}
        self.there: set[bytes] = set()

    @rule(request=requests, pages=some)
    def offer(self, request: Request, pages: list[bytes]) -> None:
        self.tier.offer(request, pages)
        self.offered[request] = set(pages)

    @rule(request=requests)
    def withdraw(self, request: Request) -> None:
        left = set(self.tier.withdraw(request))
        before = self.offered.pop(request, set())
        others = set().union(*self.offered.values())
        assert left == before - others

    @rule(pages=some)
    def store(self, pages: list[bytes]) -> None:
        wanted = [page for page in pages if self.tier.lacks(page) and page not in self.tier.coming]
        self.tier.storing(wanted)
        self.drop()
        assert len(self.there) + len(wanted) <= max(4, len(wanted)), "there is room"
        self.there |= set(wanted)
        self.tier.stored(wanted, wanted)

    @rule(pages=some)
    def fail_to_store(self, pages: list[bytes]) -> None:
        wanted = [page for page in pages if self.tier.lacks(page)]
        self.tier.storing(wanted)
        self.tier.not_stored(wanted)

    @rule(pages=some)
    def lose(self, pages: list[bytes]) -> None:
        self.tier.lost(pages)
        for offered in self.offered.values():
            offered -= set(pages)

    @rule()
    def drop(self) -> None:
        self.there -= set(self.tier.unwanted)
        self.tier.unwanted = []

    @invariant()
    def holds(self) -> None:
        kept = set(self.tier.kept)
        assert kept <= self.there - set(self.tier.unwanted)
        assert self.there - set(self.tier.unwanted) == kept
        assert len(kept) <= 5, "as many as are stored at once, or the capacity"
        offered = set().union(*self.offered.values())
        assert {page for page in PAGES if self.tier.holds(page)} == offered | kept


def test_any_life() -> None:
    case: Any = Tiers.TestCase
    case.settings = settings(max_examples=examples(100), stateful_step_count=30)
    case().runTest()


@given(st.lists(st.sampled_from(PAGES), min_size=1))
def test_what_was_used_last_is_kept(order: list[bytes]) -> None:
    tier = PeerTier(1.0)
    tier.capacity = 3
    for page in order:
        if tier.lacks(page):
            tier.storing([page])
            tier.stored([page], [b""])
        else:
            tier.use([page])
    last = list(dict.fromkeys(reversed(order)))[:3]
    assert list(tier.kept) == last[::-1]
