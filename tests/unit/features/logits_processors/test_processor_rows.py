"""Which rows a processor gets, what becomes of its errors, and what a batch that is remembered is told."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from octavo.core.params import SamplingParams
from octavo.features.logits_processors import LogitsProcessor, MoveDirectionality, Row
from octavo.features.logits_processors.load import LoadedProcessor
from octavo.features.logits_processors.payload import RowUpdate, Shares
from octavo.features.logits_processors.persistent import PersistentBatch
from octavo.features.logits_processors.worker import ProcessorsWorker, run


def rows(count: int) -> list[Row]:
    return [Row(SamplingParams(seed=number), [number], []) for number in range(count)]


class Picky(LogitsProcessor):
    """Adds ten times the row's number; chokes on the rows in `bad`, after it has spoilt the logits."""

    def __init__(self, bad: Sequence[int] = (), gives: Any = None) -> None:
        self.bad, self.gives, self.calls = bad, gives, []

    def apply(self, logits: Tensor, rows: Sequence[Row]) -> Tensor | None:
        numbers = [row.prompt_ids[0] for row in rows]
        self.calls.append(numbers)
        logits += torch.tensor(numbers)[:, None] * 10.0
        if set(numbers) & set(self.bad):
            raise ValueError(f"{numbers} hold a bad one")
        return self.gives


def test_a_batch_is_taken_at_once_and_changed_in_place() -> None:
    logits = torch.zeros(4, 3)
    picky = Picky()
    assert run(LoadedProcessor("p", picky), logits, [3, 0, 2], rows(3)) == {}
    assert picky.calls == [[0, 1, 2]]
    assert logits[:, 0].tolist() == [10, 0, 20, 0]


def test_only_those_who_fail_by_themselves_fail() -> None:
    logits = torch.zeros(4, 3)
    picky = Picky(bad=[1])
    failed = run(LoadedProcessor("p", picky), logits, [3, 0, 2], rows(3))
    assert failed == {0: "The logits processor p failed: ValueError: [1] hold a bad one"}
    assert picky.calls == [[0, 1, 2], [0], [1], [2]]
    assert logits[:, 0].tolist() == [0, 0, 20, 0]


@pytest.mark.parametrize(
    ("gives", "says"), [(torch.zeros(3), r"of shape \[1, 3\], not \[3\]"), ([1], "not list"), (7, "not int")]
)
def test_a_wrong_result_is_an_error(gives: Any, says: str) -> None:
    (error,) = run(LoadedProcessor("p", Picky(gives=gives)), torch.zeros(1, 3), [0], rows(1)).values()
    assert error.startswith("The logits processor p failed: TypeError: it must return logits")
    assert re.search(says, error)


def test_who_failed_in_one_processor_is_spared_the_next() -> None:
    later = Picky()
    worker = ProcessorsWorker("x", [LoadedProcessor("a", Picky(bad=[5])), LoadedProcessor("b", later)])
    params = SamplingParams()
    shares = [
        RowUpdate(slot=slot, processors=[0, 1], start=0, output=[], params=params, prompt=[number])
        for slot, number in ((4, 5), (9, 6))
    ]
    assert list(worker.apply(torch.zeros(3, 3), [9, 1, 4], Shares(shares))) == [2]
    assert later.calls == [[6]]


def test_a_slot_that_is_filled_anew_forgets() -> None:
    seen: list[list[int]] = []

    class Watch(LogitsProcessor):
        def apply(self, logits: Tensor, rows: Sequence[Row]) -> None:
            seen.extend(row.prompt_ids + row.output_ids for row in rows)

    worker = ProcessorsWorker("x", [LoadedProcessor("w", Watch())])
    full = {"slot": 1, "processors": [0], "params": SamplingParams()}
    worker.apply(torch.zeros(1, 3), [1], Shares([RowUpdate(start=0, output=[], prompt=[7], **full)]))
    worker.apply(torch.zeros(1, 3), [1], Shares([RowUpdate(slot=1, processors=[0], start=0, output=[8])]))
    worker.apply(torch.zeros(1, 3), [1], Shares([RowUpdate(slot=1, processors=[0], start=1, output=[9])]))
    worker.apply(
        torch.zeros(1, 3), [1], Shares([RowUpdate(slot=1, processors=[0], start=1, output=[9])])
    )  # a step tried again
    worker.add(1, None)
    worker.apply(torch.zeros(1, 3), [1], Shares([RowUpdate(start=0, output=[2], prompt=[4], **full)]))
    assert seen == [[7], [7, 8], [7, 8, 9], [7, 8, 9], [4, 2]]


class Ledger:
    """A processor of the batch interface that compares what it was told with what it gets."""

    def __init__(self) -> None:
        self.there: dict[int, int] = {}
        self.added: list[int] = []
        self.bad = -1

    def update_state(self, update: Any) -> None:
        if update is None:
            return
        for place in update.removed:
            self.there.pop(place, None)
        for place, params, _, _ in update.added:
            self.there[place] = params.seed
            self.added.append(params.seed)
        for source, place, how in update.moved:
            assert how is MoveDirectionality.UNIDIRECTIONAL
            self.there[place] = self.there.pop(source)
        assert sorted(self.there) == list(range(update.batch_size))

    def apply(self, logits: Tensor) -> Tensor:
        assert [self.there[place] for place in range(len(logits))] == logits[:, 0].tolist()
        if self.bad in self.there.values():
            raise RuntimeError("bad")
        return logits + 0.5


def test_a_remembered_batch_follows_whoever_comes_goes_and_skips() -> None:
    rng = random.Random(3)
    ledger, everyone = Ledger(), rows(12)
    batch = PersistentBatch(ledger)
    before: set[Row] = set()
    came = 0
    for _ in range(300):
        present = (
            rng.sample(everyone, rng.randrange(1, 12)) if rng.random() < 0.7 else rng.sample([*before], len(before))
        )
        if not present:
            continue
        came += len(set(present) - before)
        before = set(present)
        logits = torch.tensor([[float(row.params.seed or 0)] for row in present])
        assert batch.apply(logits, present)[:, 0].tolist() == [(row.params.seed or 0) + 0.5 for row in present]
    assert len(ledger.added) == came, "who stays is not added again"


def test_a_remembered_batch_begins_anew_after_an_error() -> None:
    ledger, everyone = Ledger(), rows(4)
    loaded = LoadedProcessor("l", PersistentBatch(ledger))
    logits = torch.tensor([[0.0], [1.0], [2.0], [3.0]])
    ledger.bad = 2
    assert list(run(loaded, logits, [0, 1, 2, 3], everyone)) == [2]
    assert logits[:, 0].tolist() == [0.5, 1.5, 2.0, 3.5]
    ledger.bad = -1
    again = torch.tensor([[3.0], [0.0]])
    assert run(loaded, again, [0, 1], [everyone[3], everyone[0]]) == {}
    assert again[:, 0].tolist() == [3.5, 0.5]
