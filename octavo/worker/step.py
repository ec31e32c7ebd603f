"""`Step`: a launched step, from its hidden states to the output that the scheduler takes in."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from octavo.core.output import BAD_LOGITS, StepOutput, TokenLogprobs
from octavo.core.plan import StepPlan
from octavo.device.transfer import Event
from octavo.sampling.drawn import Drawn
from octavo.worker.hooks import Findings, Hooks, gather

_Rows = tuple[list[list[int]], dict[int, str], dict[int, list[TokenLogprobs]]]
"""Tokens by row of the plan; row -> error; row -> log-probabilities of its tokens."""


@dataclass(slots=True)
class PromptRow:
    """A row that computes part of a prompt whose log-probabilities were asked for.

    Attributes:
        row: its index in the plan.
        start: the index in the batch of its first token.
        count: alternatives to report; -1 for the whole vocabulary.
        following: [n] int32, the prompt's token after each of the row's first n tokens.
        hidden: [n, hidden_size], the states of these n tokens, once computed.
    """

    row: int
    start: int
    count: int
    following: Tensor
    hidden: Tensor | None = None


@dataclass(slots=True)
class Step:
    """A step on its way. What few steps have is None in the others: a native step takes microseconds.

    Attributes:
        hidden: [S, hidden_size], the states of the tokens that get logits; None if a replay drew their tokens, too.
        rows: the S rows' slots, as `Slots.lay_out` gave them.
        recorded: what the replay remembers of the step in order to draw its tokens; None if nothing.
        drawn: the tokens, once drawn.
        prompted: row -> waits for the log-probabilities of its prompt.
        failed: index among the S rows -> error of a hook.
        began: when the device began with it, where that is known.
        before: the step that was under way when this one was launched.
        retired: the result was read.
    """

    plan: StepPlan
    hooks: Hooks
    hidden: Tensor | None = None
    rows: Any = None
    recorded: Any = None
    drawn: Drawn | None = None
    prompts: Sequence[PromptRow] = ()
    prompted: Mapping[int, Callable[[], list[TokenLogprobs]]] | None = None
    failed: Mapping[int, str] | None = None
    findings: Mapping[str, Findings] | None = None
    began: Event | None = None
    before: Step | None = None
    retired: bool = False

    def result(self) -> StepOutput:
        """Wait for the step's tokens and put them in the plan's order."""
        plan = self.plan
        tokens, errors, logprobs = self._drawn(self.drawn) if self.drawn is not None else self._nothing()
        prompted = {row: wait() for row, wait in self.prompted.items()} if self.prompted else {}
        found, unfound = gather(self.findings) if self.findings else ({}, {})
        output = StepOutput(tokens, logprobs, errors | unfound, prompted, found, self._idle())
        self.hooks.after_sample(plan, output)
        self.retired = True
        return output

    def _drawn(self, drawn: Drawn) -> _Rows:
        samples = self.plan.samples
        found = drawn.token_list()
        entries = drawn.logprobs_of()
        if len(found) == len(samples) and not entries and not self.failed and min(found) >= 0:
            return [[token] for token in found], {}, {}
        where = [row for row, sampled in enumerate(samples) if sampled]
        tokens: list[list[int]] = [[] for _ in samples]
        errors: dict[int, str] = {}
        for row, token in zip(where, found, strict=True):
            tokens[row] = [max(token, 0)]
            if token < 0:
                errors[row] = BAD_LOGITS
        errors |= {where[i]: error for i, error in (self.failed or {}).items()}
        logprobs = {where[i]: [entry] for i, entry in entries.items() if where[i] not in errors}
        return tokens, errors, logprobs

    def _nothing(self) -> _Rows:
        if any(self.plan.samples):
            raise AssertionError("the step was never sampled")
        return [[] for _ in self.plan.slots], {}, {}

    def _idle(self) -> float:
        """Seconds for which the device was idle before this step, whose tokens have arrived."""
        before, self.before = self.before, None
        if before is None or before.drawn is None or self.drawn is None or self.began is None:
            return 0.0
        ended = before.drawn.arrived
        return 0.0 if ended is None else max(0.0, ended.elapsed_time(self.began)) / 1e3
