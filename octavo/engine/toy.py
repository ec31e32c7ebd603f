"""`ToyDevice`: an executor without a model, for testing everything above it. It verifies every plan.

Its "model" is a fixed function of the whole context. Its KV cells hold the context that they represent, so every read
checks that the engine kept the right blocks for the right request. It runs steps as late as possible, or at random.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from octavo.core.cache_groups import FULL, CacheGroup
from octavo.core.errors import DeviceLostError
from octavo.core.output import Moved, StepOutput
from octavo.core.plan import StepPlan, Transfers
from octavo.core.spans import Spans

VOCAB = 50
EOS = 0

_PADDING = -1
"""Computed where fewer drafts were proposed than planned."""

Cell = tuple[int, ...]


def next_token(context: Sequence[int], seed: int = 0) -> int:
    """The toy model: return the token that follows a context."""
    return random.Random(hash((tuple(context), seed))).randrange(VOCAB)


def toy_generate(
    prompt: Sequence[int], max_tokens: int, *, stop_ids: Sequence[int] = (EOS,), seed: int = 0
) -> list[int]:
    """Return the tokens that a correct engine produces for a prompt."""
    tokens = list(prompt)
    while len(tokens) < len(prompt) + max_tokens:
        tokens.append(next_token(tokens, seed))
        if tokens[-1] in stop_ids:
            break
    return tokens[len(prompt) :]


def _rows(plan: StepPlan) -> tuple[list[int], list[int], list[int], list[bool]]:
    return plan.slots, plan.num_tokens, plan.num_drafts, plan.samples


class ToyMover(Protocol):
    """Moves the cells of blocks, as tests want it."""

    def begin(self, transfers: Transfers, cells: list[list[Cell | None]]) -> None:
        """Begin transfers; `cells` are those of all blocks."""
        ...

    def take(self) -> list[Moved]:
        """Return what has happened since the last call."""
        ...


@dataclass(slots=True)
class _Slot:
    tokens: list[int]
    computed: int
    tables: list[list[int]]
    seed: int
    drafts: list[int] = field(default_factory=list)


@dataclass(slots=True)
class ToyStep:
    plan: StepPlan
    device: ToyDevice
    inputs: list[list[int]] = field(default_factory=list)
    output: StepOutput | None = None

    def result(self) -> StepOutput:
        self.device.drain()
        if self.output is None:
            raise AssertionError("the step was never sampled")
        return self.output


class ToyDevice:
    """A FIFO of launched work.

    It proposes drafts where the plan asks for them, as many or fewer.

    Args:
        lazy: run work only when a result is requested; otherwise at random moments.
        fail_at: ids of plans whose forward pass raises RuntimeError.
        poison: a token that no step can compute.
        groups: cache groups of its layers, one layer each.
        lost_at: id of the plan whose result, like everything after it, raises DeviceLostError.
        mover: moves blocks from and to tiers.
        right_drafts: chance that a draft is the token that follows.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        lazy: bool = True,
        seed: int = 0,
        fail_at: Sequence[int] = (),
        poison: int | None = None,
        groups: Sequence[CacheGroup] = FULL,
        lost_at: int | None = None,
        mover: ToyMover | None = None,
        right_drafts: float = 0.6,
    ) -> None:
        self._cells: list[list[Cell | None]] = [[None] * block_size for _ in range(num_blocks)]
        self._block_size = block_size
        self._groups = tuple(groups)
        self._lazy = lazy
        self._random = random.Random(seed)
        self._fail_at = frozenset(fail_at)
        self._poison = poison
        self._lost_at = lost_at
        self._mover = mover
        self._right_drafts = right_drafts
        self._lost = False
        self._queue: deque[Callable[[], None]] = deque()
        self._slots: dict[int, _Slot] = {}
        self._before: StepPlan | None = None
        """The last launched plan; None after one that failed."""
        self.cells_computed = 0

    def forward(self, plan: StepPlan) -> ToyStep:
        step = ToyStep(plan, self)
        self._check_repeats(plan)
        if plan.id in self._fail_at:
            raise self._failed(f"the toy device was told to fail at step {plan.id}")
        self._enqueue(lambda: self._forward(step))
        return step

    def _check_repeats(self, plan: StepPlan) -> None:
        """Check that a plan with `repeats` has the rows of the previous plan, which has not failed."""
        before, self._before = self._before, plan
        if plan.repeats and (plan.new or before is None or _rows(plan) != _rows(before) or before.id != plan.id - 1):
            raise AssertionError(f"plan {plan.id} does not repeat the one before")

    def _failed(self, text: str) -> RuntimeError:
        self._queue.clear()
        self._before = None
        return RuntimeError(text)

    def sample(self, step: ToyStep, payload: dict[str, Any]) -> None:
        self._enqueue(lambda: self._sample(step))

    def watch(self, spans: Spans) -> None:
        """Do nothing: the steps have no parts to record."""

    def drain(self) -> None:
        if self._lost:
            raise DeviceLostError("toy device", "it was told to break")
        while self._queue:
            self._queue.popleft()()

    def _enqueue(self, work: Callable[[], None]) -> None:
        self._queue.append(work)
        if not self._lazy and self._random.random() < 0.5:
            self.drain()

    def _forward(self, step: ToyStep) -> None:
        plan = step.plan
        if plan.id == self._lost_at:
            self._lost = True
            raise DeviceLostError("toy device", "it was told to break")
        self._apply(plan)
        if plan.transfers is not None:
            assert self._mover is not None
            self._mover.begin(plan.transfers, self._cells)
        spans = []
        for slot, count, drafts in zip(plan.slots, plan.num_tokens, plan.num_drafts, strict=True):
            state = self._slots[slot]
            start = state.computed
            padding = [_PADDING] * (drafts - len(state.drafts))
            inputs = (state.tokens[start:] + state.drafts[:drafts] + padding)[:count]
            if len(inputs) != count:
                raise AssertionError(f"slot {slot}: the plan computes {count} tokens but the device has {len(inputs)}")
            if self._poison in inputs:
                raise self._failed(f"the toy device can't compute token {self._poison} (slot {slot})")
            step.inputs.append(inputs)
            content = self._content(plan, len(step.inputs) - 1, state.tokens[:start] + inputs)
            spans.append((state, start, content))
        for index, group in enumerate(self._groups):
            if group.grows:
                self._attend(spans, index, group)
            else:
                for state, start, context in spans:
                    self._advance(state.tables[index][0], context, start)

    def _content(self, plan: StepPlan, row: int, context: list[int]) -> list[int]:
        """Return what the cells of a row's context represent: the context, unless its KV depends on more."""
        return context

    def _apply(self, plan: StepPlan) -> None:
        for row in plan.new:
            self._slots[row.slot] = _Slot(
                list(row.tokens), row.num_computed, [list(blocks) for blocks in row.blocks], row.seed
            )
        for slot, group, index, block in plan.block_writes:
            table = self._slots[slot].tables[group]
            table.extend([-1] * (index + 1 - len(table)))
            table[index] = block
        for source, destination in plan.copies:
            self._cells[destination] = list(self._cells[source])

    def _attend(self, spans: Sequence[tuple[_Slot, int, list[int]]], index: int, group: CacheGroup) -> None:
        """Write the KV of all rows, then read all positions that each row's tokens attend to."""
        for state, start, context in spans:
            for position in range(start, len(context)):
                self._write(state.tables[index], position, tuple(context[: position + 1]))
        for state, start, context in spans:
            for position in range(group.first_read(start), len(context)):
                self._read(state.tables[index], position, tuple(context[: position + 1]))

    def _advance(self, block: int, context: Sequence[int], start: int) -> None:
        """Bring a recurrent state from position `start` to the end of the context."""
        if start and self._cells[block][0] != tuple(context[:start]):
            raise AssertionError(f"the state in block {block} is {self._cells[block][0]}, not {tuple(context[:start])}")
        self._cells[block][0] = tuple(context)

    def _write(self, table: list[int], position: int, cell: Cell) -> None:
        self._cells[table[position // self._block_size]][position % self._block_size] = cell
        self.cells_computed += 1

    def _read(self, table: list[int], position: int, expected: Cell) -> None:
        block = table[position // self._block_size]
        found = self._cells[block][position % self._block_size]
        if found != expected:
            raise AssertionError(f"KV of position {position} in block {block} belongs to {found}, not to {expected}")

    def _sample(self, step: ToyStep) -> None:
        plan = step.plan
        tokens = []
        rows = zip(plan.slots, plan.samples, plan.num_drafts, step.inputs, strict=True)
        for row, (slot, samples, drafts, inputs) in enumerate(rows):
            state = self._slots[slot]
            if samples:
                accepted = self._verify(state, inputs[len(inputs) - drafts :] if drafts else [])
                rejected = drafts + 1 - len(accepted)
                if rejected and not all(group.grows for group in self._groups):  # the row is computed again
                    rejected = len(inputs)
                state.computed += len(inputs) - rejected
                state.tokens += accepted
                state.drafts = self._draft(state, plan.proposals.get(row, 0))
            else:
                accepted = []
                state.computed += len(inputs)
            tokens.append(accepted)
        told = plan.proposals if plan.proposals and self._random.random() < 0.5 else {}
        proposed = {row: len(self._slots[plan.slots[row]].drafts) for row in told}
        shown = plan.proposals if plan.reports_drafts else {}
        drafted = {row: list(self._slots[plan.slots[row]].drafts) for row in shown}
        moved = self._mover.take() if self._mover else []
        step.output = StepOutput(tokens, drafts=proposed, drafted=drafted, moved=moved)

    def _verify(self, state: _Slot, drafts: list[int]) -> list[int]:
        """Return the model's tokens as far as the drafts agree with them, and one more."""
        accepted: list[int] = []
        for draft in [*drafts, None]:
            accepted.append(next_token(state.tokens + accepted, state.seed))
            if accepted[-1] != draft:
                break
        return accepted

    def _draft(self, state: _Slot, most: int) -> list[int]:
        """As many drafts as may be, or fewer."""
        count = most if self._random.random() < 0.5 else self._random.randint(0, most)
        drafts: list[int] = []
        while len(drafts) < count:
            right = self._random.random() < self._right_drafts
            drafts.append(next_token(state.tokens + drafts, state.seed) if right else self._random.randrange(VOCAB))
        return drafts
