"""`Scheduler`: decides each step from bounds (`plan`) and takes in what it produced (`commit`).

There is no prefill and no decode here. Every request has `uncomputed` tokens; a step computes as many of them as the
budget and the KV cache allow. A new prompt, a chunk of one, a decode, a draft check and a resume after preemption
differ only in that number.
"""

from __future__ import annotations

import bisect
import enum
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from octavo.cache.cache import BlockTable, KVCache
from octavo.core.errors import InvalidRequestError
from octavo.core.output import FinishReason, RequestTimes, StepOutput, TokenDelta, TokenLogprobs
from octavo.core.plan import NewRow, PlanDraft, StepPlan
from octavo.core.request import GenerateRequest, Request
from octavo.core.stats import EngineStats
from octavo.schedule.hooks import EngineHook
from octavo.schedule.limits import Limits, checked_max_tokens
from octavo.schedule.policy import Policy, Rank
from octavo.schedule.prompt_news import prompt_news
from octavo.schedule.queue import WaitingQueue
from octavo.schedule.repetition import repeats


@dataclass(slots=True)
class _Step:
    """A plan in the making: its layout, the requests behind its rows, and what the rows left."""

    budget: int
    draft: PlanDraft = field(default_factory=PlanDraft)
    rows: list[Request] = field(default_factory=list)
    prompts: set[Request] = field(default_factory=set)
    """Requests whose prompt this step computes, in whole or in part."""
    starved: Rank | None = None
    """The best rank that found no room: whatever becomes free is for it, so nothing ranked after it gets a row."""


class _Admission(enum.Enum):
    DONE = enum.auto()
    WAIT = enum.auto()  # others may pass
    FULL = enum.auto()  # nobody may


class Scheduler:
    """Owns every `Request`; nobody else changes one. `seed` starts the seeds of requests that bring none."""

    def __init__(
        self,
        cache: KVCache,
        limits: Limits,
        policy: Policy,
        *,
        eos_token_ids: Sequence[int] = (),
        hooks: Sequence[EngineHook] = (),
        seed: int = 0,
    ) -> None:
        self.cache = cache
        self.limits = limits
        self._policy = policy
        self._hooks = hooks
        self._eos = frozenset(eos_token_ids)
        self._seeds = random.Random(seed)
        self._stats = EngineStats(num_blocks=cache.num_blocks, block_size=cache.block_size)
        self._waiting = WaitingQueue(policy)
        self._running: list[Request] = []
        self._alive: dict[str, list[Request]] = {}
        self._launched: dict[int, list[Request]] = {}
        self._free_slots = list(range(limits.max_num_seqs - 1, -1, -1))
        self._freed: list[int] = []
        self._num_arrivals = 0
        self._num_plans = 0
        self._num_deferred = 0
        self._refused: list[tuple[Request, InvalidRequestError]] = []

    # Requests come and go

    def add(self, spec: GenerateRequest) -> None:
        """Queue a request.

        Raises:
            InvalidRequestError: it can never fit, or its id is in use.
        """
        if spec.id in self._alive:
            raise InvalidRequestError("request_id is in use by a running request.", param="request_id", value=spec.id)
        max_tokens = checked_max_tokens(spec, self.cache, self.limits)
        own_stops = frozenset(spec.params.stop_token_ids or ())
        choices: list[Request] = []
        for index in range(spec.params.n):
            request = Request(
                spec=spec,
                index=index,
                order=self._num_arrivals,
                tokens=list(spec.tokens),
                max_tokens=max_tokens,
                stop_ids=own_stops if spec.params.ignore_eos else own_stops | self._eos,
                seed=self._seeds.getrandbits(62) if spec.params.seed is None else spec.params.seed + index,
                table=BlockTable(),
                leader=choices[0] if choices else None,
            )
            self._num_arrivals += 1
            choices.append(request)
            self._waiting.push(request)
        self._alive[spec.id] = choices

    def abort(self, request_id: str, index: int | None = None) -> list[TokenDelta]:
        """End a request, or one choice of it, that has not ended yet; unknown ids are ignored."""
        choices = [r for r in self._alive.get(request_id, ()) if index is None or r.index == index]
        return [self._finish(r, FinishReason.ABORT) for r in choices if r.finish is None]

    def fail_in_flight(self, error: str) -> list[TokenDelta]:
        """A launched step did not run: end the requests it held, and distrust what the prefix tree says."""
        self._launched.clear()
        deltas = []
        for request in list(self._running):
            if request.inflight:
                request.inflight = 0
                if request.finish is None:
                    deltas.append(self._finish(request, FinishReason.ERROR, error=error))
                else:
                    self._release(request)
        self.cache.reset()
        return deltas

    def fail_head(self, error: str) -> list[TokenDelta]:
        """End the waiting request that is next in line."""
        request = self._waiting.peek()
        return [] if request is None else [self._finish(request, FinishReason.ERROR, error=error)]

    def take_refused(self) -> list[TokenDelta]:
        """End the requests that a feature found to be impossible while the last step was planned."""
        refused, self._refused = self._refused, []
        return [
            self._finish(request, FinishReason.ERROR, error=error.message, refused=error.param or "")
            for request, error in refused
            if request.finish is None
        ]

    @property
    def has_work(self) -> bool:
        return bool(self._running) or bool(self._waiting)

    @property
    def is_stuck(self) -> bool:
        """Whether somebody waits although nothing runs and no feature asked for the wait. Never true, by design."""
        return bool(self._waiting) and not self._running and not self._num_deferred

    # Plan

    def plan(self) -> StepPlan | None:
        """Decide the next step from what is known now; None if nothing can be computed."""
        step = _Step(budget=self.limits.max_num_batched_tokens)
        self._plan_running(step)
        self._plan_waiting(step)
        if not step.rows:
            return None
        for hook in self._hooks:
            hook.on_plan(step.draft, step.rows)
        plan = step.draft.freeze(self._num_plans, self._freed)
        self._num_plans += 1
        self._freed = []
        self._launched[plan.id] = step.rows
        self._count_step(plan)
        return plan

    def payload(self, plan: StepPlan) -> dict[str, Any]:
        """What the features' worker halves need to sample the plan; called after its forward pass was launched."""
        rows = self._launched[plan.id]
        made = {hook.name: hook.before_sample(plan, rows) for hook in self._hooks}
        return {name: value for name, value in made.items() if value is not None}

    def _plan_running(self, step: _Step) -> None:
        """Rows that only decode come first, so that no prompt holds them up; within each group by rank."""
        small: list[Request] = []
        large: list[Request] = []
        for request in self._running:
            if request.finish is None and request.inflight < self.limits.max_ahead and not request.certain_to_finish:
                (small if request.uncomputed <= 1 + request.num_drafts else large).append(request)
        for request in small + large:
            preempted = request.slot < 0
            if not preempted and (step.starved is None or self._policy.rank(request) < step.starved):
                self._plan_row(step, request)

    def _plan_row(self, step: _Step, request: Request) -> None:
        num_tokens = self._allowed(request, step.budget)
        if num_tokens <= 0:
            return
        while not self._add_row(step, request, num_tokens):
            victim = self._victim(step, request)
            if victim is None:
                step.starved = self._policy.rank(request)
                return
            self._preempt(victim)

    def _plan_waiting(self, step: _Step) -> None:
        passed: list[Request] = []
        while step.starved is None and step.budget > 0 and self._free_slots:
            request = self._waiting.peek()
            admission = _Admission.FULL if request is None else self._admit(step, request)
            if request is None or admission is _Admission.FULL:
                break
            self._waiting.pop()
            if admission is _Admission.WAIT:
                passed.append(request)
        self._num_deferred = len(passed)
        for request in passed:
            self._waiting.push(request)

    def _admit(self, step: _Step, request: Request) -> _Admission:
        """Give a waiting request the KV it can share, a slot, and its first row."""
        leader = request.leader
        if leader is not None and leader.finish is None and not request.num_preemptions:
            if leader.slot < 0 or leader.num_computed < leader.num_prompt or leader in step.prompts:
                return _Admission.WAIT
            self.cache.fork(leader.table, request.table, request.num_prompt)
            request.num_computed = request.num_prompt - 1
        elif request.params.prompt_logprobs is None:  # else its whole prompt is looked at, so none of it is shared
            request.num_computed = self.cache.match(request.table, self._namespace(request), request.tokens)
        shared = request.num_computed
        num_tokens = self._allowed(request, step.budget)
        if num_tokens <= 0 or not self._has_room(request):
            self.cache.release(request.table)
            request.num_computed = 0
            return _Admission.WAIT if num_tokens <= 0 else _Admission.FULL
        request.slot = self._free_slots.pop()
        if not self._add_row(step, request, num_tokens):
            raise AssertionError(f"no KV block for request {request.id}, although there was room")
        step.draft.new.append(self._new_row(request, shared))
        bisect.insort(self._running, request, key=self._policy.rank)
        self._count_admission(request, shared)
        return _Admission.DONE

    def _has_room(self, request: Request) -> bool:
        """Room for all known tokens, a copy of a shared block, and some for the running ones to grow into."""
        missing = self.cache.blocks_for(len(request.tokens) + 1) - len(request.table.blocks)
        copied = 1 if len(request.table.blocks) * self.cache.block_size > request.num_computed else 0
        reserve = min(len(self._running), self.cache.num_blocks // 50)
        return missing + copied + reserve <= self.cache.num_free

    def _allowed(self, request: Request, budget: int) -> int:
        """How many of its tokens the request computes in this step; drafts go all together or not at all."""
        num_tokens = min(request.uncomputed, budget)
        for hook in self._hooks:
            try:
                num_tokens = min(num_tokens, hook.admit(request, num_tokens))
            except InvalidRequestError as error:
                self._refused.append((request, error))
                return 0
        end = request.num_computed + num_tokens
        splits_drafts = num_tokens < request.uncomputed and end >= len(request.tokens) + request.pending
        return 0 if request.num_drafts and splits_drafts else num_tokens

    def _add_row(self, step: _Step, request: Request, num_tokens: int) -> bool:
        """Launch `num_tokens` of a request that has a slot; False, and nothing changed, if KV blocks lack."""
        start, end = request.num_computed, request.num_computed + num_tokens
        growth = self.cache.grow(request.table, start, end)
        if growth is None:
            return False
        samples = num_tokens == request.uncomputed
        drafts = request.num_drafts if samples else 0
        draft = step.draft
        draft.slots.append(request.slot)
        draft.num_tokens.append(num_tokens)
        draft.num_drafts.append(drafts)
        draft.samples.append(samples)
        draft.copies.extend(growth.copies)
        draft.block_writes.extend((request.slot, index, block) for index, block in growth.writes)
        step.rows.append(request)
        step.budget -= num_tokens
        if start < request.num_prompt:
            step.prompts.add(request)
        request.num_computed = end
        request.inflight += 1
        if samples:
            request.pending += 1 + drafts
            request.num_drafts = self.limits.num_drafts
        self._register(request)
        return True

    def _new_row(self, request: Request, shared: int) -> NewRow:
        return NewRow(
            slot=request.slot,
            tokens=list(request.tokens),
            num_prompt=request.num_prompt,
            params=request.params,
            seed=request.seed,
            stop_ids=sorted(request.stop_ids),
            num_computed=shared,
            blocks=list(request.table.blocks),
            options=request.spec.options,
        )

    # Preemption

    def _victim(self, step: _Step, needy: Request) -> Request | None:
        """An idle request ranked after `needy`, so that the first in line always gets on; None if there is none yet."""
        rank = self._policy.rank(needy)
        planned = set(step.rows)
        idle = [
            r
            for r in self._running
            if not r.inflight and r.finish is None and r not in planned and self._policy.rank(r) > rank
        ]
        return max(idle, key=self._policy.victim_rank, default=None)

    def _preempt(self, request: Request) -> None:
        """Take slot and blocks back. Its full blocks stay findable, so a resume is often a prefix hit."""
        request.num_lost = request.num_computed
        request.num_preemptions += 1
        self._stats.num_preemptions += 1
        self._give_back(request)
        request.num_computed = request.pending = request.num_drafts = 0
        self._waiting.push(request)

    # Commit

    def commit(self, plan: StepPlan, output: StepOutput) -> list[TokenDelta]:
        """Take in a step's tokens; the news for their requests, some of which end here."""
        deltas = []
        for row, request in enumerate(self._launched.pop(plan.id)):
            request.inflight -= 1
            if row in output.prompt_logprobs and request.finish is None:
                deltas += prompt_news(request, output.prompt_logprobs[row])
            if plan.samples[row]:
                sampled = output.tokens[row]
                request.pending -= 1 + plan.num_drafts[row]
                request.num_computed -= 1 + plan.num_drafts[row] - len(sampled)
                if request.finish is None:
                    error = output.errors.get(row)
                    deltas.append(
                        self._finish(request, FinishReason.ERROR, error=error)
                        if error is not None
                        else self._append(request, sampled, output.logprobs.get(row))
                    )
            if request.finish is not None and not request.inflight and request.slot >= 0:
                self._release(request)
        return deltas

    def _append(self, request: Request, sampled: list[int], logprobs: list[TokenLogprobs] | None) -> TokenDelta:
        tokens: list[int] = []
        reason: FinishReason | None = None
        for token in sampled:
            request.tokens.append(token)
            tokens.append(token)
            if token in request.stop_ids:
                reason = FinishReason.STOP
                break
            rule = request.params.repetition_detection
            if rule is not None and repeats(request.tokens[request.num_prompt :], rule):
                reason = FinishReason.REPETITION
                break
            if request.num_output >= request.max_tokens:
                reason = FinishReason.LENGTH
                break
        if not request.first_token:
            request.first_token = time.monotonic()
        self._stats.generation_tokens += len(tokens)
        complete = [hook.on_commit(request, tokens) for hook in self._hooks]
        kept = None if logprobs is None else logprobs[: len(tokens)]
        if any(complete) and reason is not FinishReason.STOP:
            return self._finish(request, FinishReason.STOP, tokens=tokens, logprobs=kept, complete=True)
        if reason is not None:
            return self._finish(request, reason, tokens=tokens, logprobs=kept)
        return TokenDelta(request.id, request.index, tokens, kept, request.num_cached)

    def _finish(
        self,
        request: Request,
        reason: FinishReason,
        *,
        tokens: list[int] | None = None,
        logprobs: list[TokenLogprobs] | None = None,
        error: str | None = None,
        complete: bool = False,
        refused: str | None = None,
    ) -> TokenDelta:
        """The one place where a request ends. Its slot and blocks go now if no launched step holds them, else later."""
        request.finish = reason
        last = tokens[-1] if tokens else None
        if request.slot < 0:
            self._waiting.discard()
            self._forget(request)
        elif not request.inflight:
            self._release(request)
        times = RequestTimes(request.spec.arrival, request.first_scheduled, request.first_token, time.monotonic())
        return TokenDelta(
            request.id,
            request.index,
            tokens or [],
            logprobs,
            request.num_cached,
            reason,
            last if reason is FinishReason.STOP and not complete and last not in self._eos else None,
            error,
            times,
            request.num_preemptions,
            complete,
            refused,
        )

    def _release(self, request: Request) -> None:
        self._give_back(request)
        self._forget(request)

    def _give_back(self, request: Request) -> None:
        if request.inflight:
            raise AssertionError(f"request {request.id} has {request.inflight} steps in flight and can't be freed")
        if request.finish is not FinishReason.ERROR:
            self._register(request)
        self.cache.release(request.table)
        self._running.remove(request)
        self._free_slots.append(request.slot)
        self._freed.append(request.slot)
        request.slot = -1

    def _forget(self, request: Request) -> None:
        for hook in self._hooks:
            hook.on_release(request)
        if all(r.finish is not None and r.slot < 0 for r in self._alive.get(request.id, ())):
            self._alive.pop(request.id, None)

    # Small rules

    def _register(self, request: Request) -> None:
        known = min(request.num_computed, len(request.tokens))
        self.cache.register(request.table, self._namespace(request), request.tokens, known)

    def _namespace(self, request: Request) -> str:
        return request.spec.namespace if self.limits.share_prefixes else request.id

    # Counting

    def stats(self) -> EngineStats:
        """The counters, with the gauges brought up to date."""
        stats, pool = self._stats, self.cache.pool
        stats.num_running = len(self._running)
        stats.num_waiting = len(self._waiting)
        stats.num_waiting_deferred = self._num_deferred
        stats.num_blocks_used = pool.num_used
        stats.num_blocks_cached = pool.num_cached
        stats.blocks_copied = self.cache.num_copied
        stats.blocks_evicted = self.cache.num_evicted
        stats.kv_slots_allocated = pool.num_used * self.cache.block_size
        stats.kv_slots_filled = stats.kv_slots_allocated - self._unfilled()
        return stats

    def check_idle(self) -> None:
        """Raise AssertionError if anything is held although no request is alive."""
        self.cache.check()
        if self._alive or self.cache.num_free != self.cache.num_blocks:
            used = self.cache.pool.num_used
            raise AssertionError(f"{used} blocks and {len(self._alive)} requests are left although nothing runs")

    def forget_past(self) -> None:
        """Drop cached contents and counters; nothing may be running."""
        self.cache.reset()
        self.cache.num_copied = self.cache.num_evicted = 0
        self._stats = EngineStats(num_blocks=self.cache.num_blocks, block_size=self.cache.block_size)

    def count_times(self, *, plan: float, launch: float, retire: float) -> None:
        """Add a step's seconds: spent planning, launching, and waiting for tokens and taking them in."""
        stats = self._stats
        stats.plan_s += plan
        stats.launch_s += launch
        stats.retire_s += retire
        stats.last_step_s = plan + launch + retire
        stats.last_step_at = time.monotonic()

    def _unfilled(self) -> int:
        size = self.cache.block_size
        return sum(len(r.table.blocks) * size - r.num_computed for r in self._running)

    def _count_step(self, plan: StepPlan) -> None:
        stats = self._stats
        stats.num_steps += 1
        stats.step_tokens += plan.total_tokens
        stats.step_rows += len(plan.slots)
        allocated = self.cache.pool.num_used * self.cache.block_size
        if allocated:
            stats.waste_samples += 1
            stats.waste_sum += self._unfilled() / allocated

    def _count_admission(self, request: Request, shared: int) -> None:
        stats = self._stats
        if request.first_scheduled:
            stats.recomputed_tokens += max(0, request.num_lost - shared)
            return
        request.first_scheduled = time.monotonic()
        request.num_cached = shared
        stats.prefix_cache_queries += request.num_prompt
        stats.prefix_cache_hits += shared
        stats.prompt_tokens += request.num_prompt
        stats.prompt_tokens_cached += shared
        stats.prompt_tokens_computed += request.num_prompt - shared
