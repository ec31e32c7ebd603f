"""Pages of features on the toy device: a mover that fills them, late, failing and in any order, and a device that
checks them whenever a step reads them."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from octavo.core.output import Moved, TransferState
from octavo.core.plan import StepPlan, Transfer, Transfers
from octavo.engine.toy import Cell, ToyDevice, ToyMover, ToyStep

SPOILT = (-2,)
"""What is in a block while a load fills it, or after a load that failed."""


@dataclass
class PageMover:
    """Fills a block with its page's name. `others` moves what belongs to other features.

    Attributes:
        latency: probability that a load ends at a look at it.
        failures: probability that a page fails.
        missing: returns whether a page can't be loaded at all.
    """

    feature: str
    rng: random.Random
    latency: float = 0.5
    failures: float = 0.0
    others: ToyMover | None = None
    missing: Callable[[bytes], bool] = lambda name: False
    work: dict[int, tuple[Transfer, list[list[Cell | None]]]] = field(default_factory=dict)
    news: list[Moved] = field(default_factory=list)
    count: int = 0
    """Pages loaded."""

    def begin(self, transfers: Transfers, cells: list[list[Cell | None]]) -> None:
        own = [load for load in transfers.loads if load.tier == self.feature]
        rest = [load for load in transfers.loads if load.tier != self.feature]
        if self.others is not None:
            self.others.begin(Transfers(rest, transfers.stores, []), cells)
        theirs = self.others.work if self.others is not None else {}
        for ticket in transfers.doubted:
            if ticket not in self.work and ticket not in theirs:
                self.news.append(Moved(ticket, TransferState.UNKNOWN))
        for load in own:
            assert load.ticket not in self.work
            self.work[load.ticket] = load, cells
            for block in load.blocks:
                cells[block] = [SPOILT] * len(cells[block])

    def take(self) -> list[Moved]:
        for ticket, (load, cells) in list(self.work.items()):
            if self.rng.random() < self.latency:
                del self.work[ticket]
                self.news.append(Moved(ticket, TransferState.ENDED, self._fill(load, cells)))
        news, self.news = self.news, []
        return news + (self.others.take() if self.others is not None else [])

    def _fill(self, load: Transfer, cells: list[list[Cell | None]]) -> list[int]:
        failed = []
        for i, (name, block) in enumerate(zip(load.pages, load.blocks, strict=True)):
            if self.missing(name) or self.rng.random() < self.failures:
                failed.append(i)
            else:
                cells[block] = [tuple(name)] * len(cells[block])
                self.count += 1
        return failed


class PageDevice(ToyDevice):
    """Checks the pages that a step reads when it runs, which is as late as possible.

    `read` returns (name, block) of every page that a plan's rows read.
    """

    read: Callable[[StepPlan], list[tuple[bytes, int]]]

    def _forward(self, step: ToyStep) -> None:
        super()._forward(step)
        for name, block in self.read(step.plan):
            found = self._cells[block]
            assert found == [tuple(name)] * len(found), f"block {block} has {found[0]}, not page {tuple(name)}"
