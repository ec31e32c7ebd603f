"""`Mover`: moves pages between the KV cache and the tiers' worker halves, while steps are computed.

A store copies blocks to the host's memory on a stream of its own and hands them to the tier (`stores.py`). A load has
the tier fill the host's memory, and then copies it into blocks on that stream (`loads.py`). Both go on between and
beside steps, and no step waits for them: a tier that names `rooms` is given memory that was reserved at the start, in
which larger loads take turns in parts; other tiers allocate memory in their threads.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping
from functools import partial

from octavo.core.output import Moved, TransferState
from octavo.core.plan import Transfer, Transfers
from octavo.device.transfer import Link
from octavo.worker.blocks import Blocks
from octavo.worker.hooks import WorkerHook
from octavo.worker.loads import Loads
from octavo.worker.stores import Stores


class Mover:
    """All transfers of one worker.

    Args:
        link: of the device that has the blocks.
        tiers: name of a feature -> its worker half.
    """

    def __init__(self, blocks: Blocks, link: Link, tiers: Mapping[str, WorkerHook]) -> None:
        copier = link.copier()
        self._news: deque[Moved] = deque()
        # Not by methods, which would be cycles: rooms are freed with the last reference, without a collection.
        self._stores = Stores(blocks, copier, tiers, partial(_report, self._news))
        self._loads = Loads(blocks, copier, tiers, partial(_loaded, self._news))

    def begin(self, transfers: Transfers) -> None:
        """Begin transfers. One that can't be begun has failed; nothing is raised."""
        for ticket in transfers.doubted:
            if ticket not in self._stores and ticket not in self._loads:
                self._news.append(Moved(ticket, TransferState.UNKNOWN))
        for transfer in transfers.stores:
            self._stores.begin(transfer)
        for transfer in transfers.loads:
            self._loads.begin(transfer)
        self.advance()

    def advance(self) -> None:
        """Have each transfer take its next step, if the one before has ended."""
        self._stores.advance()
        self._loads.advance()

    def take(self) -> list[Moved]:
        """Return what has happened since the last call."""
        self.advance()
        return [self._news.popleft() for _ in range(len(self._news))]

    def close(self) -> None:
        """Wait for copies under way, since the blocks' memory is freed next. What has not ended is never reported."""
        self._stores.close()
        self._loads.close()


def _report(news: deque[Moved], transfer: Transfer, state: TransferState, failed: Collection[int]) -> None:
    news.append(Moved(transfer.ticket, state, sorted(failed)))


def _loaded(news: deque[Moved], transfer: Transfer, failed: Collection[int]) -> None:
    """Report the end of a load. May be called in any thread."""
    _report(news, transfer, TransferState.ENDED, failed)
