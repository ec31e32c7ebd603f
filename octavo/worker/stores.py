"""`Stores`: pages on their way from the KV cache to the tiers' worker halves.

A store is divided into parts of some MiB. A part is copied to the host's memory, and then handed to its tier. A step
can take longer than a copy, so where copies go on beside steps, a thread waits for them, and parts of a large store are
with the tier while others are still being copied.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from octavo.core import futures
from octavo.core.output import TransferState
from octavo.core.plan import Transfer
from octavo.device.transfer import Copier, Copy
from octavo.worker.blocks import Blocks
from octavo.worker.hooks import WorkerHook
from octavo.worker.loads import Failed

log = logging.getLogger(__name__)

_PART_BYTES = 32 << 20
"""Of pages that are copied together: enough to be fast, and little memory on a device that may be full."""

Report = Callable[[Transfer, TransferState, Collection[int]], None]
"""Called for what happens to a store, with the indices of pages that could not be kept."""


@dataclass(slots=True)
class _Part:
    """Consecutive pages of a store, from index `first` on. First `copy` ends, then `kept`, which the tier returned."""

    first: int
    names: list[bytes]
    copy: Copy
    kept: Failed | None = None


@dataclass(slots=True)
class _Store:
    """
    Attributes:
        read: it was reported that its blocks were read.
    """

    transfer: Transfer
    parts: list[_Part]
    read: bool = False


class Stores:
    """All stores of one worker.

    Args:
        tiers: name of a feature -> its worker half.
    """

    def __init__(self, blocks: Blocks, copier: Copier, tiers: Mapping[str, WorkerHook], report: Report) -> None:
        self._blocks = blocks
        self._copier = copier
        self._tiers = tiers
        self._report = report
        self._most = max(1, _PART_BYTES // max(1, blocks.page_bytes))
        self._stores: dict[int, _Store] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="octavo-stores")

    def __contains__(self, ticket: int) -> bool:
        """Whether a store is under way. If it is not any more, its end has been reported."""
        return ticket in self._stores

    def begin(self, transfer: Transfer) -> None:
        """Begin to copy, after the steps launched so far. If that fails, the store ends with no page kept."""
        store = self._stores[transfer.ticket] = _Store(transfer, [])
        try:
            for first in range(0, len(transfer.pages), self._most):
                blocks = transfer.blocks[first : first + self._most]
                copy = self._copier.out(partial(self._blocks.gather, blocks))
                store.parts.append(_Part(first, transfer.pages[first : first + self._most], copy))
        except Exception:
            log.exception("failed to copy %d pages for the tier %r", len(transfer.pages), transfer.tier)
            self._end(store, range(len(transfer.pages)))
            return
        if self._copier.anywhere:
            for part in store.parts:
                self._thread.submit(self._hand_over, transfer.tier, part)

    def advance(self) -> None:
        """Hand over what was copied, unless the thread does it, and report what has happened."""
        for store in list(self._stores.values()):
            if not self._copier.anywhere:
                for part in store.parts:
                    if part.kept is None and part.copy.done():
                        self._hand_over(store.transfer.tier, part)
            found = [part.kept for part in store.parts if part.kept is not None]
            if len(found) < len(store.parts):
                continue
            if all(kept.done() for kept in found):
                self._end(store, [part.first + index for part in store.parts for index in _failed(part)])
            elif not store.read:
                store.read = True
                self._report(store.transfer, TransferState.READ, ())

    def close(self) -> None:
        """Wait for copies under way, since the blocks' memory is freed next. What has not ended is never reported."""
        self._thread.shutdown(cancel_futures=True)
        stores, self._stores = self._stores, {}
        for store in stores.values():
            for part in store.parts:
                with suppress(Exception):  # from a lost device, which copies nothing any more
                    part.copy.wait()

    def _hand_over(self, tier: str, part: _Part) -> None:
        """Wait for the copy, and give its pages to the tier, whose failure is its own."""
        try:
            part.kept = self._tiers[tier].store(part.names, part.copy.wait())
        except Exception as error:
            log.exception("the tier %r failed to keep %d pages", tier, len(part.names))
            part.kept = futures.failed(error)

    def _end(self, store: _Store, failed: Collection[int]) -> None:
        del self._stores[store.transfer.ticket]
        self._report(store.transfer, TransferState.ENDED, failed)


def _failed(part: _Part) -> Collection[int]:
    """Return the indices in a part of pages that were not kept."""
    if part.kept is None:
        raise AssertionError("a part that was not handed over has no result")
    if (error := part.kept.exception()) is not None:
        log.error("%d pages were not kept: %s", len(part.names), error)
        return range(len(part.names))
    return part.kept.result()
