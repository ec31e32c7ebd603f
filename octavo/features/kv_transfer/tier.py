"""`PeerTier`: which pages other servers offer, and which are kept for them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence

import msgspec

from octavo.cache.tier import Tier
from octavo.features.kv_transfer.offer import NAME, is_sent
from octavo.schedule.request import Request


class PeerTier(Tier):
    """
    Attributes:
        kept: pages that the worker half keeps for other servers, least recently offered first.
        coming: those that it will get.
        expects: called with pages that it is to expect.
        unwanted: those that it is to drop.
        capacity: most pages to keep; 0 until the worker half has said it.
        num_dropped, num_lost: pages dropped for lack of space, and pages that another server no longer had.
    """

    name = NAME

    def __init__(self, deadline_s: float) -> None:
        self.deadline_s = deadline_s
        self.kept: OrderedDict[bytes, None] = OrderedDict()
        self.coming: set[bytes] = set()
        self.expects: Callable[[Sequence[bytes]], None] | None = None
        self.unwanted: list[bytes] = []
        self.capacity = 0
        self.num_dropped = self.num_lost = 0
        self._offered: dict[bytes, int] = {}
        """Page -> for how many requests."""
        self._of: dict[Request, list[bytes]] = {}

    def holds(self, page: bytes) -> bool:
        return page in self._offered or page in self.kept

    def wants(self, options: Mapping[str, msgspec.Raw]) -> bool:
        return is_sent(options)

    def wants_shared(self, options: Mapping[str, msgspec.Raw]) -> bool:
        return is_sent(options)

    def lacks(self, page: bytes) -> bool:
        return page not in self.kept

    def storing(self, pages: Sequence[bytes]) -> None:
        """Make room first: the worker half drops what is unwanted before it gets these pages."""
        self.coming.update(pages)
        while self.kept and len(self.kept) + len(self.coming) > self.capacity:
            page, _ = self.kept.popitem(last=False)
            self.num_dropped += 1
            self.unwanted.append(page)
        if self.expects is not None:
            self.expects(pages)

    def stored(self, pages: Sequence[bytes], before: Sequence[bytes]) -> None:
        """Keep those that are still expected: after a failure, or a reset, what comes late is dropped."""
        self.unwanted += [page for page in pages if page not in self.coming]
        self.use([page for page in pages if page in self.coming])
        self.coming.difference_update(pages)

    def not_stored(self, pages: Sequence[bytes]) -> None:
        self.coming.difference_update(pages)
        self.unwanted += pages

    def lost(self, pages: Sequence[bytes]) -> None:
        """Forget these pages, offered and kept: some rank lacks them."""
        self.num_lost += len(pages)
        gone = set(pages)
        for request, offered in self._of.items():
            self._of[request] = [page for page in offered if page not in gone]
        for page in pages:
            self._offered.pop(page, None)
            self.kept.pop(page, None)
        self.unwanted += pages

    def use(self, pages: Sequence[bytes]) -> None:
        """Make these pages the most recently used."""
        for page in pages:
            self.kept[page] = None
            self.kept.move_to_end(page)

    def offer(self, request: Request, pages: list[bytes]) -> None:
        """Another server has these pages of a request's prompt."""
        self.withdraw(request)
        self._of[request] = pages
        for page in pages:
            self._offered[page] = self._offered.get(page, 0) + 1

    def withdraw(self, request: Request) -> list[bytes]:
        """The request needs the pages no longer; return those that no other needs."""
        gone = []
        for page in self._of.pop(request, ()):
            self._offered[page] -= 1
            if not self._offered[page]:
                del self._offered[page]
                gone.append(page)
        return gone

    def clear(self) -> None:
        """Drop all pages that are kept, or on their way."""
        self.unwanted += [*self.kept, *self.coming]
        self.kept.clear()
        self.coming.clear()
