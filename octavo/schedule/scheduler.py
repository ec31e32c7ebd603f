"""`Scheduler`: decides each step from bounds (`plan`) and takes in what it produced (`commit`).

There is no prefill and no decode here. Every request has `uncomputed` tokens; a step computes as many of them as the
budget and the KV cache allow. A new prompt, a chunk of one, a decode, a draft check and a resume after preemption
differ only in that number.
"""

from __future__ import annotations

import bisect
import random
import time
from collections.abc import Sequence
from typing import Any

from octavo.cache.cache import KVCache
from octavo.core.errors import InvalidRequestError
from octavo.core.output import FinishReason, StepOutput, TokenDelta, TokenLogprobs
from octavo.core.plan import PlanDraft, StepPlan
from octavo.core.request import GenerateRequest, Request
from octavo.core.stats import EngineStats
from octavo.schedule.beam import Beams
from octavo.schedule.choices import make_choices
from octavo.schedule.counters import Counters
from octavo.schedule.endings import append
from octavo.schedule.hooks import EngineHook, admitted, committed, released
from octavo.schedule.limits import Limits, checked_max_tokens
from octavo.schedule.news import NOTHING, Last, last_news, prompt_news
from octavo.schedule.policy import Policy, Rank
from octavo.schedule.quarantine import Quarantine
from octavo.schedule.queue import WaitingQueue
from octavo.schedule.room import Room
from octavo.schedule.steady import Steady, concerned
from octavo.schedule.step import Admission, Step
from octavo.schedule.victims import displaced_by, victim_of


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
        self._counters = Counters(cache)
        self._waiting = WaitingQueue(policy)
        self._quarantine = Quarantine()
        self._running: list[Request] = []
        self._alive: dict[str, list[Request]] = {}
        self._launched: dict[int, list[Request]] = {}
        self._free_slots = list(range(limits.max_num_seqs - 1, -1, -1))
        self._freed: list[int] = []
        self._num_arrivals = 0
        self._num_plans = 0
        self._num_deferred = 0
        self._refused: list[tuple[Request, InvalidRequestError | RuntimeError]] = []
        self._beams = Beams()
        self._steady: Steady | None = None
        self._repeats = not limits.num_drafts and all(hook.opt_in for hook in hooks)
        self._room = Room(cache, self._beams, share_prefixes=limits.share_prefixes)

    # Requests come and go

    def add(self, spec: GenerateRequest) -> None:
        """Queue a request.

        Raises:
            InvalidRequestError: it can never fit, or its id is in use.
        """
        if spec.id in self._alive:
            raise InvalidRequestError("request_id is in use by a running request.", param="request_id", value=spec.id)
        max_tokens = checked_max_tokens(spec, self.cache, self.limits)
        choices = make_choices(spec, max_tokens, self._eos, self._seeds, self._num_arrivals)
        self._num_arrivals += len(choices)
        for request in choices:
            self._waiting.push(request)
        self._alive[spec.id] = choices
        self._beams.open(choices)

    def abort(self, request_id: str, index: int | None = None) -> list[TokenDelta]:
        """End a request, or one choice of it, that has not ended yet; unknown ids are ignored."""
        choices = [r for r in self._alive.get(request_id, ()) if index is None or r.index == index]
        return [delta for r in choices if r.finish is None for delta in self._end(r, FinishReason.ABORT)]

    def recover(self, error: str) -> list[TokenDelta]:
        """A launched step failed, and whatever was in flight with it is lost. Distrust what the prefix tree says.

        If that was one row, its request ends with the error. Else all are recomputed from their tokens, one request and
        one step at a time, before anything else runs; see `Quarantine`.
        """
        self._launched.clear()
        self._steady = None
        held = {r: r.inflight for r in self._running if r.inflight}
        alive = {r: steps for r, steps in held.items() if r.finish is None}
        if sum(held.values()) > 1:
            guilty = self._quarantine.enter(alive)
        else:
            head = self._quarantine.current or self._waiting.peek()
            guilty = list(alive) if held else [head] if head else []
            self._quarantine.convicted()
        for request in held:
            request.inflight = 0
            if request.finish is not None:
                self._release(request)
            elif request not in guilty:
                self._preempt(request)
        deltas = []
        for request in guilty:
            deltas += self._end(request, FinishReason.ERROR, error=error) if request.finish is None else []
        self.cache.reset()
        return deltas

    def fail_head(self, error: str) -> list[TokenDelta]:
        """End the waiting request that is next in line."""
        request = self._waiting.peek()
        return [] if request is None else self._end(request, FinishReason.ERROR, error=error)

    def take_refused(self) -> list[TokenDelta]:
        """End the requests that a feature refused, or failed on, while the last step was planned."""
        deltas = []
        for request, error in self._refused:
            if request.finish is None:
                refused = (error.param or "") if isinstance(error, InvalidRequestError) else None
                text = error.message if isinstance(error, InvalidRequestError) else str(error)
                deltas += self._end(request, FinishReason.ERROR, error=text, refused=refused)
        self._refused = []
        return deltas

    @property
    def has_work(self) -> bool:
        return bool(self._running) or bool(self._waiting)

    @property
    def is_stuck(self) -> bool:
        """Whether somebody waits although nothing runs and no feature asked for the wait. Never true, by design."""
        return bool(self._waiting) and not self._running and not self._num_deferred and not self._quarantine

    # Plan

    def plan(self) -> StepPlan | None:
        """Decide the next step from what is known now; None if nothing can be computed."""
        rows, draft = self._repeat() or self._decide()
        if not rows:
            return None
        for hook in concerned(self._hooks, self._steady, rows):
            hook.on_plan(draft, rows)
        plan = draft.freeze(self._num_plans, self._freed)
        self._num_plans += 1
        self._freed = []
        self._launched[plan.id] = rows
        return plan

    def _repeat(self) -> tuple[list[Request], PlanDraft] | None:
        """The last step once more, where nothing else can follow."""
        steady = self._steady
        if steady is None or self._waiting or len(self._launched) >= self.limits.max_ahead:
            return None
        draft = steady.next()
        if draft is not None:
            self._counters.step(len(steady.rows), len(steady.rows), steady.unfilled)
        return None if draft is None else (steady.rows, draft)

    def _decide(self) -> tuple[list[Request], PlanDraft]:
        """A step from scratch."""
        step = Step(budget=self.limits.max_num_batched_tokens)
        self._steady = None
        try:
            if self._quarantine.current is not None:
                self._plan_alone(step)
            else:
                self._make_way(step)
                self._plan_running(step)
                self._plan_waiting(step)
                while not step.rows and self._yield_beam(step):
                    step.starved = None
                    self._plan_running(step)
                    self._plan_waiting(step)
        finally:
            self._num_deferred = len(step.deferred)
            for request in step.deferred:
                self._waiting.push(request)
        if not step.rows:
            return [], step.draft
        unfilled = self._counters.unfilled(self._running)
        self._counters.step(len(step.rows), sum(step.draft.num_tokens), unfilled)
        if self._repeats and not self._waiting and not self._quarantine:
            ahead = self.limits.max_ahead
            self._steady = Steady.after(step, self._running, unfilled, self.cache, self._room, ahead, self._hooks)
        return step.rows, step.draft

    def payload(self, plan: StepPlan) -> dict[str, Any]:
        """What the features' worker halves need to sample the plan; called after its forward pass was launched."""
        rows = self._launched[plan.id]
        hooks = concerned(self._hooks, self._steady, rows)
        made = {hook.name: hook.before_sample(plan, rows) for hook in hooks}
        return {name: value for name, value in made.items() if value is not None}

    def _plan_running(self, step: Step) -> None:
        """Rows that only decode come first, so that no prompt holds them up; within each group by rank.

        A waiting request may rank before one whose prompt still takes several steps; then it is admitted first.
        """
        small: list[Request] = []
        large: list[Request] = []
        for request in self._running:
            if self._beams.hold(request):
                continue
            if request.finish is None and request.inflight < self.limits.max_ahead and not request.certain_to_finish:
                (small if request.uncomputed <= 1 + request.num_drafts else large).append(request)
        for request in small:
            if self._may_run(step, request):
                self._plan_row(step, request)
        for request in large:
            self._plan_waiting(step, before=self._policy.rank(request))
            if self._may_run(step, request):
                self._plan_row(step, request)

    def _plan_alone(self, step: Step) -> None:
        """After a failure: a step with one row, of a request under suspicion, and nothing else in flight."""
        turns = 0 if self._launched else len(self._quarantine)
        for _ in range(turns):
            suspect = self._quarantine.current
            if suspect is None or self._plan_suspect(step, suspect):
                return
            self._quarantine.postpone()

    def _plan_suspect(self, step: Step, suspect: Request) -> bool:
        """Whatever room it needs is taken from the others, who stand still meanwhile."""
        others = sorted((r for r in self._running if r is not suspect), key=self._policy.victim_rank)
        if suspect.slot < 0:
            while (found := self._admit(step, suspect) if self._free_slots else Admission.FULL) is Admission.FULL:
                self._preempt(others.pop())
            if found is Admission.DONE:
                self._waiting.remove(suspect)
            return found is Admission.DONE
        num_tokens = self._allowed(suspect, step.budget)
        while num_tokens > 0 and not self._add_row(step, suspect, num_tokens):
            self._preempt(others.pop())
        return num_tokens > 0

    def _may_run(self, step: Step, request: Request) -> bool:
        preempted = request.slot < 0 or request in step.yielding
        return not preempted and (step.starved is None or self._policy.rank(request) < step.starved)

    def _plan_row(self, step: Step, request: Request) -> None:
        num_tokens = self._allowed(request, step.budget)
        if num_tokens <= 0:
            return
        while not self._add_row(step, request, num_tokens):
            victim = victim_of(request, self._running, set(step.rows), self._policy)
            if victim is None:
                step.starved = self._policy.rank(request)
                return
            self._preempt(victim)

    def _plan_waiting(self, step: Step, before: Rank | None = None) -> None:
        """Admit by rank while there is room; with `before`, only those of a lower rank."""
        while step.starved is None and step.budget > 0 and self._free_slots:
            request = self._waiting.peek()
            if request is None or (before is not None and self._policy.rank(request) > before):
                return
            admission = self._admit(step, request)
            if admission is Admission.FULL:
                return
            self._waiting.pop()
            if admission is Admission.WAIT:
                step.deferred.append(request)

    def _admit(self, step: Step, request: Request) -> Admission:
        """Give a waiting request the KV it can share, a slot, and its first row."""
        if not self._room.share(request, step.prompts):
            return Admission.WAIT
        shared = request.num_computed
        num_tokens = self._allowed(request, step.budget)
        if num_tokens <= 0 or self._room.shortage(request, len(self._running)) > 0:
            self._room.unshare(request)
            waits = num_tokens <= 0 and not self.limits.whole_prompts
            return Admission.WAIT if waits else Admission.FULL
        request.slot = self._free_slots.pop()
        if not self._add_row(step, request, num_tokens):
            raise AssertionError(f"no KV block for request {request.id}, although there was room")
        step.add_new(request, shared, self._beams.params(request))
        bisect.insort(self._running, request, key=self._policy.rank)
        self._counters.admission(request, shared)
        return Admission.DONE

    def _allowed(self, request: Request, budget: int) -> int:
        """How many of its tokens the request computes in this step; drafts go all together or not at all."""
        num_tokens = min(request.uncomputed, budget)
        if self.limits.whole_prompts and num_tokens < request.uncomputed:
            return 0
        num_tokens, error = admitted(self._hooks, request, num_tokens)
        if error is not None:
            self._refused.append((request, error))
        end = request.num_computed + num_tokens
        splits_drafts = num_tokens < request.uncomputed and end >= len(request.tokens) + request.pending
        return 0 if request.num_drafts and splits_drafts else num_tokens

    def _add_row(self, step: Step, request: Request, num_tokens: int) -> bool:
        """Launch `num_tokens` of a request that has a slot; False, and nothing changed, if KV blocks lack."""
        start, end = request.num_computed, request.num_computed + num_tokens
        growth = self.cache.grow(request.table, start, end)
        if growth is None:
            return False
        samples = num_tokens == request.uncomputed and request.max_tokens > 0
        drafts = request.num_drafts if samples else 0
        step.add_row(request, num_tokens, growth, samples=samples, drafts=drafts)
        if self._beams.moved(request):
            step.add_new(request, start, self._beams.params(request))
        request.num_computed = end
        request.inflight += 1
        if samples:
            request.pending += 1 + drafts
            request.num_drafts = self.limits.num_drafts
        self._room.register(request)
        return True

    # Preemption

    def _make_way(self, step: Step) -> None:
        """If the first in line finds no room, but may displace running requests, let as few of them yield as will do.

        All of them or none: one that has steps in flight gets no further row now and is preempted when they are done.
        """
        first = self._waiting.peek()
        if first is None or not self._running or not self._policy.displaces(first, self._running[-1]):
            return
        if not self._room.share(first, step.prompts):
            return
        shortage = self._room.shortage(first, len(self._running))
        victims: list[Request] = []
        if (shortage > 0 or not self._free_slots) and self._allowed(first, step.budget) > 0:
            victims = displaced_by(first, self._running, shortage, self._policy, self.cache)
        self._room.unshare(first)
        if any(victim.inflight for victim in victims):
            step.yielding.update(victims)
        else:
            for victim in victims:
                self._preempt(victim)

    def _yield_beam(self, step: Step) -> bool:
        """Nothing runs because beams hold slots and blocks while they wait for one of theirs; whether one yielded."""
        needy = (step.starved, self._policy.rank(head) if (head := self._waiting.peek()) else None)
        ranks = [rank for rank in needy if rank is not None and not self._launched]
        victim = self._beams.yielding(self._running, lambda r: self._policy.rank(r) > min(ranks)) if ranks else None
        if victim is not None:
            self._preempt(victim)
        return victim is not None

    def _preempt(self, request: Request) -> None:
        """Take slot and blocks back. Its full blocks stay findable, so a resume is often a prefix hit."""
        request.num_lost = request.num_computed
        request.num_preemptions += 1
        self._counters.stats.num_preemptions += 1
        self._give_back(request)
        request.num_computed = request.pending = request.num_drafts = 0
        self._waiting.push(request)

    # Commit

    def commit(self, plan: StepPlan, output: StepOutput) -> list[TokenDelta]:
        """Take in a step's tokens; the news for their requests, some of which end here."""
        self._counters.idle(output.idle_s)
        rows, steady = self._launched.pop(plan.id), self._steady
        if steady is not None and rows is steady.rows and not (output.errors or output.logprobs):
            self._counters.stats.generation_tokens += len(rows)
            return steady.take(output.tokens, self._append)
        deltas = []
        for row, request in enumerate(rows):
            request.inflight -= 1
            if row in output.prompt_logprobs and request.finish is None:
                deltas += prompt_news(request, output.prompt_logprobs[row])
            if plan.samples[row]:
                sampled = output.tokens[row]
                self._quarantine.passed(request)
                request.pending -= 1 + plan.num_drafts[row]
                request.num_computed -= 1 + plan.num_drafts[row] - len(sampled)
                if request.finish is None:
                    error, found = output.errors.get(row), output.logprobs.get(row)
                    if error is not None:
                        deltas += self._end(request, FinishReason.ERROR, error=error)
                    elif request.params.beam_width and found:
                        deltas += self._report(request, found[0])
                    else:
                        deltas.append(self._append(request, sampled, found))
                        self._counters.stats.generation_tokens += len(deltas[-1].tokens)
            elif request.finish is None and not request.inflight and request.certain_to_finish:
                deltas += self._answer(request, output, row)
            if request.finish is not None and not request.inflight and request.slot >= 0:
                self._release(request)
        return deltas

    def _report(self, beam: Request, found: TokenLogprobs) -> list[TokenDelta]:
        """A beam's part of a round; at the end of the search the news of those that are answered."""
        deltas = []
        for one, hypothesis in self._beams.report(beam, found, self.cache):
            one.first_token = time.monotonic()
            reason = FinishReason.STOP if hypothesis.stopped else FinishReason.LENGTH
            delta = self._finish(one, reason, Last(hypothesis.tokens, logprob=hypothesis.logprob))
            if one.index < one.params.n:
                self._counters.stats.generation_tokens += len(hypothesis.tokens)
                deltas.append(delta)
        return deltas

    def _end(
        self, request: Request, reason: FinishReason, *, error: str | None = None, refused: str | None = None
    ) -> list[TokenDelta]:
        """End a request before its time; beams end together, and only those that would be answered are told of."""
        last = Last(error=error, refused=refused)
        deltas = [self._finish(r, reason, last) for r in self._beams.together(request)]
        return [delta for delta in deltas if delta.index < request.params.n]

    def _answer(self, request: Request, output: StepOutput, row: int) -> list[TokenDelta]:
        """End a request that ends with its prompt, with what the features found in it."""
        self._quarantine.passed(request)
        error, found = output.errors.get(row), output.found.get(row)
        if error is not None:
            return self._end(request, FinishReason.ERROR, error=error)
        return [self._finish(request, FinishReason.STOP, Last(complete=True, found=found))]

    def _append(self, request: Request, sampled: list[int], logprobs: list[TokenLogprobs] | None) -> TokenDelta:
        tokens, reason = append(request, sampled)
        if not request.first_token:
            request.first_token = time.monotonic()
        complete, failed = committed(self._hooks, request, tokens)
        kept = None if logprobs is None else logprobs[: len(tokens)]
        if failed is not None:
            return self._finish(request, FinishReason.ERROR, Last(tokens, kept, error=failed))
        if complete and reason is not FinishReason.STOP:
            return self._finish(request, FinishReason.STOP, Last(tokens, kept, complete=True))
        if reason is not None:
            return self._finish(request, reason, Last(tokens, kept))
        return TokenDelta(request.id, request.index, tokens, kept, request.num_cached)

    def _finish(self, request: Request, reason: FinishReason, last: Last = NOTHING) -> TokenDelta:
        """The one place where a request ends. Its slot and blocks go now if no launched step holds them, else later."""
        request.finish = reason
        self._steady = None
        if request.slot < 0:
            self._waiting.discard()
            self._forget(request)
        elif not request.inflight:
            self._release(request)
        return last_news(request, self._eos, last)

    def _release(self, request: Request) -> None:
        self._give_back(request)
        self._forget(request)

    def _give_back(self, request: Request) -> None:
        if request.inflight:
            raise AssertionError(f"request {request.id} has {request.inflight} steps in flight and can't be freed")
        if request.finish is not FinishReason.ERROR:
            self._room.register(request)
        self.cache.release(request.table)
        self._running.remove(request)
        self._free_slots.append(request.slot)
        self._freed.append(request.slot)
        self._beams.moved(request)  # if it comes back, its slot is filled anyway
        request.slot = -1

    def _forget(self, request: Request) -> None:
        released(self._hooks, request)
        if all(r.finish is not None and r.slot < 0 for r in self._alive.get(request.id, ())):
            self._alive.pop(request.id, None)
            self._beams.close(request)

    # Counting

    def stats(self) -> EngineStats:
        """The counters, with the gauges brought up to date."""
        unfilled = self._counters.unfilled(self._running) if self._steady is None else self._steady.unfilled
        return self._counters.snapshot(len(self._running), len(self._waiting), self._num_deferred, unfilled)

    def count_times(self, *, plan: float, launch: float, retire: float) -> None:
        """Add a step's seconds: spent planning, launching, and waiting for tokens and taking them in."""
        self._counters.times(plan=plan, launch=launch, retire=retire)

    def check_idle(self) -> None:
        """Raise AssertionError if anything is held although no request is alive."""
        self.cache.check_empty(len(self._alive))

    def forget_past(self) -> None:
        """Drop cached contents and counters; nothing may be running."""
        self.cache.reset()
        self._counters.forget()
