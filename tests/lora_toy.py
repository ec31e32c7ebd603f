"""The engine half of adapters on the toy device: its worker half is simulated, and reads as late as the test wants."""

from __future__ import annotations

import random
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest
from page_kit import PageDevice, PageMover

from octavo.core.errors import EngineStateError, ModelFileError
from octavo.core.futures import done, failed
from octavo.core.plan import StepPlan
from octavo.engine.toy import VOCAB, ToyStep
from octavo.features.lora import names
from octavo.features.lora.adapter_file import AdapterFile, AdapterForm
from octavo.features.lora.layout import Manifest, Piece, Target, TargetPart
from octavo.features.lora.payload import NAME, RankTargets, page_names, pages_of
from octavo.features.lora.requests import Part, encode

SLICE_BYTES = 1024
"""A block has two tiles, so an adapter of rank r takes r blocks."""
INVOCATION = (7, 8)
LAYER = Target("layers.0", (TargetPart("up", 8, 8, 8, 8),))
HEAD = Target("lm_head", (TargetPart("", 8, 8, 8, 8),), head=True)


def folders(root: Path, ranks: Mapping[str, int]) -> dict[str, str]:
    """Make a folder for each adapter; its last name says its rank: NAME-RANK."""
    found = {}
    for name, rank in ranks.items():
        path = root / f"{name}-{rank}"
        path.mkdir(parents=True, exist_ok=True)
        found[name] = str(path)
    return found


def fake_files(patch: pytest.MonkeyPatch) -> None:
    """Have folders of `folders` read as adapters: "head" in the name for one of the head, "gain" for one with gains,
    "called" for one that the tokens `INVOCATION` activate."""

    class FakeChecker:
        def __init__(self, targets: Any, max_rank: int, added_tokens: int) -> None:
            self.max_rank = max_rank

        def read(self, path: Path) -> AdapterFile:
            name, _, rank = path.name.rpartition("-")
            if not rank.isdigit() or int(rank) > self.max_rank:
                raise ModelFileError(f"{path} is no adapter of rank 1 to {self.max_rank}.")
            piece = Piece(1 if "head" in name else 0, 0, int(rank), gain="gain" in name)
            manifest = Manifest((piece,), INVOCATION if "called" in name else ())
            return AdapterFile(path, AdapterForm(manifest, ()))

    patch.setattr(names, "Checker", FakeChecker)


@dataclass
class ToyWorker:
    """The host side of the worker half: `read` ends when the test calls `turn`, and sometimes fails.

    Attributes:
        latency: probability that a read ends in a turn.
        failures: probability that it fails.
        host: uids of the copies.
        known: uids of the adapters that steps can use.
        asleep: calls fail, as in a sleep of the engine.
        ranks: machine of each rank, and the version of the files that it reads there.
    """

    rng: random.Random
    latency: float = 1.0
    failures: float = 0.0
    host: set[int] = field(default_factory=set)
    known: set[int] = field(default_factory=set)
    asleep: bool = False
    pending: list[tuple[int, Future[Any]]] = field(default_factory=list)
    reads: list[list[str]] = field(default_factory=list)
    most_on_host: int = 0
    ranks: list[tuple[str, str]] = field(default_factory=lambda: [("", "1")])

    def call(self, feature: str, method: str, args: Mapping[str, Any]) -> Future[list[Any]]:
        assert feature == NAME
        if self.asleep:
            return failed(EngineStateError("The engine sleeps."))
        args = msgspec.msgpack.decode(msgspec.msgpack.encode(args))
        if method == "targets":
            return done([msgspec.to_builtins(RankTargets((LAYER, HEAD), (0, 1), 1, SLICE_BYTES, 4))])
        if method == "drop":
            self.host.remove(args["uid"])
            return done([{}])
        if method == "forget":
            self.host.discard(args["uid"])
            self.known.discard(args["uid"])
            return done([{}])
        if method == "replaced":
            return done([{}])
        assert method == "read"
        assert args["uid"] not in self.host
        future: Future[Any] = Future()
        self.pending.append((args["uid"], future))
        self.reads.append([Path(source[0]).name for source in args["sources"]])
        return future

    def turn(self) -> None:
        for one in list(self.pending):
            if self.rng.random() < self.latency:
                self.pending.remove(one)
                if self.rng.random() < self.failures:
                    one[1].set_exception(ModelFileError("the file is gone"))
                else:
                    self.host.add(one[0])
                    self.known.add(one[0])
                    self.most_on_host = max(self.most_on_host, len(self.host))
                    one[1].set_result([{"machine": machine, "version": version} for machine, version in self.ranks])

    def mover(self, **how: Any) -> PageMover:
        return PageMover(NAME, self.rng, missing=lambda name: pages_of([name])[0] not in self.host, **how)


class LoraDevice(PageDevice):
    """Keeps the worker's tables, and checks the adapter of every row that a step has. Cells represent the adapter of
    each token, too, if it changes the token's KV."""

    def prepare(self, names_of: Any, worker: ToyWorker) -> None:
        """`names_of`: slot -> uid that the row must have, the position where it begins, and whether it changes KV; None
        for none."""
        self.worker = worker
        self.tables: dict[int, tuple[int, list[int]]] = {}
        self.rows: list[int] = []
        self.wanted = names_of
        self.adapters: dict[int, list[tuple[tuple[int, int, bool] | None, int]]] = {}
        """Plan id -> the adapter of each row, and how many of its tokens are said to be skipped."""
        self.payloads = 0
        self.read = lambda plan: []

    def forward(self, plan: StepPlan) -> ToyStep:
        """Check at the launch what the host knows then."""
        payload = plan.payload.get(NAME)
        if payload is not None:
            self.payloads += 1
            for entry in payload.entries:
                assert entry.uid in self.worker.known, "an adapter was forgotten"
                self.tables[entry.index] = entry.uid, entry.blocks
            if payload.rows is not None:
                self.rows = payload.rows
            assert len(self.rows) == len(plan.slots)
            found = [None if index < 0 else self.tables[index][0] for index in self.rows]
            used = {self.tables[index][0]: self.tables[index][1] for index in self.rows if index >= 0}
        else:
            found, used = [None] * len(plan.slots), {}
        wanted = [self.wanted(slot) for slot in plan.slots]
        assert found == [one and one[0] for one in wanted], "a row has another adapter"
        skipped = payload.skipped if payload is not None else None
        self.adapters[plan.id] = list(zip(wanted, skipped or [0] * len(wanted), strict=True))
        step = super().forward(plan)
        self._enqueue(lambda: self._check(used))
        return step

    def _content(self, plan: StepPlan, row: int, context: list[int]) -> list[int]:
        adapter, skipped = self.adapters[plan.id][row]
        if adapter is None:
            return context
        uid, start, changes = adapter
        first, count = len(context) - plan.num_tokens[row], plan.num_tokens[row]
        assert skipped == min(max(start - first, 0), count), "an adapter begins at another token"
        return [token + VOCAB * uid * (changes and i >= start) for i, token in enumerate(context)]

    def _check(self, used: Mapping[int, list[int]]) -> None:
        for uid, blocks in used.items():
            for name, block in zip(page_names(uid, len(blocks)), blocks, strict=True):
                assert self._cells[block] == [tuple(name)] * len(self._cells[block]), "an adapter's block was changed"


def option(*parts: str | tuple[str, float]) -> dict[str, msgspec.Raw]:
    """A request's options for these adapters."""
    return {NAME: encode(tuple(Part(part) if isinstance(part, str) else Part(*part) for part in parts))}
