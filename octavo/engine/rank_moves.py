"""`RankMoves`: reports of transfers, which count once all ranks have made them: each moves its part of a page."""

from __future__ import annotations

from collections.abc import Sequence
from threading import Lock

from octavo.core.output import Moved, TransferState


class _Transfer:
    """What the ranks have reported of one transfer."""

    def __init__(self) -> None:
        self.read: set[int] = set()
        self.ended: dict[int, Moved] = {}
        self.told_read = False


class RankMoves:
    """Collects the ranks' reports; they may come from several threads, and those of a slow rank steps later.

    Args:
        size: number of ranks.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._lock = Lock()
        self._transfers: dict[int, _Transfer] = {}
        self._news: list[Moved] = []

    def add(self, rank: int, moved: Sequence[Moved]) -> None:
        """Take in reports of a rank.

        A rank does not know a transfer any more that it has reported to have ended; its first report of an end counts.
        """
        with self._lock:
            for news in moved:
                transfer = self._transfers.setdefault(news.ticket, _Transfer())
                transfer.read.add(rank)
                if news.state is not TransferState.READ:
                    transfer.ended.setdefault(rank, news)
                self._conclude(news.ticket, transfer)

    def take(self) -> list[Moved]:
        """Return what all ranks have reported since the last call."""
        with self._lock:
            news, self._news = self._news, []
        return news

    def _conclude(self, ticket: int, transfer: _Transfer) -> None:
        if len(transfer.ended) == self._size:
            del self._transfers[ticket]
            reports = transfer.ended.values()
            unknown = any(one.state is TransferState.UNKNOWN for one in reports)
            failed = sorted({index for one in reports for index in one.failed})
            self._news.append(Moved(ticket, TransferState.UNKNOWN if unknown else TransferState.ENDED, failed))
        elif len(transfer.read) == self._size and not transfer.told_read:
            transfer.told_read = True
            self._news.append(Moved(ticket, TransferState.READ))
