"""`Step`: a launched step, from its hidden states to its `StepOutput`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from torch import Tensor

from octavo.core.output import BAD_LOGITS, StepOutput, TokenLogprobs
from octavo.core.plan import StepPlan
from octavo.device.transfer import Event
from octavo.sampling.drawn import Drawn
from octavo.worker.drafts import StoredDrafts
from octavo.worker.hooks import Findings, Hooks, gather
from octavo.worker.mover import Mover

_RowResults = tuple[list[list[int]], dict[int, str], dict[int, list[TokenLogprobs]]]
"""Tokens by row of the plan; row -> error; row -> log-probabilities of its tokens."""


@dataclass(slots=True)
class PromptRow:
    """A row that computes part of a prompt with requested log-probabilities.

    Attributes:
        row: its index in the plan.
        start: index of its first token in the batch.
        count: alternatives to report; -1 for the whole vocabulary.
        following: [n] int32, the prompt token after each of the row's first n tokens.
        hidden: [n, hidden_size], hidden states of these n tokens; None until computed.
    """

    row: int
    start: int
    count: int
    following: Tensor
    hidden: Tensor | None = None


@dataclass(slots=True)
class Step:
    """A launched step. Rare fields are None by default, since a native step takes microseconds.

    Attributes:
        hidden: [S, hidden_size], hidden states of the tokens that get logits; None if a replay also sampled them.
        rows: the slots of the S rows, as returned by `Slots.lay_out`.
        recorded: the replay's key for sampling the step; None for none.
        drawn: the sampled tokens; None until sampled.
        prompts: rows with requested prompt log-probabilities that are not computed yet.
        prompted: row -> function that waits for the log-probabilities of its prompt.
        failed: index among the S rows -> error text of a hook.
        findings: feature name -> function that waits for its results.
        drafts: function that waits for the proposed drafts; None if none were asked for.
        began: event of the step's start on the device; None on devices without events.
        before: the step that was running when this one was launched.
        retired: whether the result was read.
        mover: moves pages of the KV cache; None if no feature keeps any.
        passed_on: a later stage of the pipeline samples its tokens.
    """

    plan: StepPlan
    hooks: Hooks
    hidden: Tensor | None = None
    rows: Any = None
    recorded: Any = None
    drawn: Drawn | None = None
    prompts: Sequence[PromptRow] = ()
    prompted: dict[int, Callable[[], list[TokenLogprobs]]] | None = None
    failed: Mapping[int, str] | None = None
    findings: Mapping[str, Findings] | None = None
    drafts: Callable[[], StoredDrafts] | None = None
    began: Event | None = None
    before: Step | None = None
    retired: bool = False
    mover: Mover | None = None
    passed_on: bool = False

    def result(self) -> StepOutput:
        """Wait for the step's tokens and return them in the plan's order."""
        plan = self.plan
        tokens, errors, logprobs = self._drawn(self.drawn) if self.drawn is not None else self._nothing()
        prompted = {row: wait() for row, wait in self.prompted.items()} if self.prompted else {}
        found, unfound = gather(self.findings) if self.findings else ({}, {})
        moved = [] if self.mover is None else self.mover.take()
        output = StepOutput(tokens, logprobs, errors | unfound, prompted, found, self._idle(), moved=moved)
        if self.drafts is not None:
            stored = self.drafts()
            output = msgspec.structs.replace(output, drafts=stored.counts, drafted=stored.tokens)
        if not self.passed_on:
            self.hooks.after_sample(plan, output)
        self.retired = True
        return output

    def _drawn(self, drawn: Drawn) -> _RowResults:
        samples = self.plan.samples
        found = drawn.token_list()
        entries = drawn.logprobs_of()
        kept = drawn.kept()
        if kept is not None:
            return self._verified(found, entries, kept)
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

    def _verified(self, found: Sequence[int], entries: Mapping[int, TokenLogprobs], kept: Sequence[int]) -> _RowResults:
        """Return the results of a step with drafts; `kept` are the numbers of tokens of its sampling rows."""
        plan, failed = self.plan, self.failed or {}
        tokens: list[list[int]] = [[] for _ in plan.slots]
        errors: dict[int, str] = {}
        logprobs: dict[int, list[TokenLogprobs]] = {}
        sampling = [row for row, samples in enumerate(plan.samples) if samples]
        start = 0
        for row, count in zip(sampling, kept, strict=True):
            mine = range(start, start + count)
            tokens[row] = [max(found[i], 0) for i in mine]
            wrong = [failed.get(i, BAD_LOGITS) for i in mine if i in failed or found[i] < 0]
            if wrong:
                errors[row] = wrong[0]
            elif start in entries:
                logprobs[row] = [entries[i] for i in mine]
            start += 1 + plan.num_drafts[row]
        return tokens, errors, logprobs

    def _nothing(self) -> _RowResults:
        if any(self.plan.samples) and not self.passed_on:
            raise AssertionError("the step was never sampled")
        return [[] for _ in self.plan.slots], {}, {}

    def _idle(self) -> float:
        """Return the seconds for which the device was idle before this step; valid once its tokens have arrived."""
        before, self.before = self.before, None
        if before is None or before.drawn is None or self.drawn is None or self.began is None:
            return 0.0
        ended = before.drawn.arrived
        return 0.0 if ended is None else max(0.0, ended.elapsed_time(self.began)) / 1e3
