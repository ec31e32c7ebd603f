"""`Scheduler`: plan each step from bounds (`plan`) and process its output (`commit`).

`Planner` chooses what a step computes, and `Requests` keeps queue, slots and blocks. This module adds requests, appends
their tokens, and ends them.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any
from uuid import uuid4

from octavo.cache.cache import KVCache
from octavo.core.errors import InvalidRequestError, id_in_use, internal_error
from octavo.core.output import FinishReason, StepOutput, TokenDelta, TokenLogprobs
from octavo.core.plan import PlanDraft, StepPlan
from octavo.core.request import GenerateRequest
from octavo.core.stats import EngineStats
from octavo.schedule.counters import Counters
from octavo.schedule.drafts import DraftBounds
from octavo.schedule.hooks import (
    EngineHook,
    added,
    committed,
    extended,
    held_blocks,
    hooks_of,
    lockstep_of,
    measured,
    namespaced,
    reason,
    results,
    told,
    turning,
)
from octavo.schedule.limits import Limits, checked_max_tokens
from octavo.schedule.outputs import Last, append, last_news, prompt_news, times_at_first_token
from octavo.schedule.pages import HookCall, PageLoads, Pages, is_pages, merged, tickets
from octavo.schedule.planner import Planner
from octavo.schedule.policy import Policy
from octavo.schedule.quarantine import Quarantine
from octavo.schedule.request import Request
from octavo.schedule.requests import Requests
from octavo.schedule.siblings import make_siblings
from octavo.schedule.steady import Steady
from octavo.schedule.tiers import Tiers
from octavo.schedule.turns import Turns

log = logging.getLogger(__name__)

_MOST_WAITS = 64
"""Most requests in `EngineStats.waits`."""


class Scheduler:
    """Owns every `Request`; no other part changes one. `seed` seeds the requests that set none."""

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
        self.counters = Counters(cache, hooks)
        self._hooks = hooks
        self._eos = frozenset(eos_token_ids)
        self._seeds = random.Random(seed)
        self._num_arrivals = self._num_plans = 0
        self._quarantine = Quarantine()
        tiers = [hook.tier for hook in hooks if hook.tier is not None]
        numbers = tickets()
        self._tiers = Tiers(tiers, cache, self.counters, tickets=numbers) if tiers and limits.share_prefixes else None
        self._loads = PageLoads(numbers)
        self._life = uuid4().hex
        self.turning = turning(hooks)
        self._readers = [hook for hook in hooks if type(hook).on_commit is not EngineHook.on_commit]
        self._requests = Requests(cache, policy, limits, hooks, self.counters.watchers, self._tiers, self._life)
        self._drafts = DraftBounds(hooks, limits, cache)
        self._planner = Planner(
            self._requests, cache, limits, policy, hooks, self._quarantine, self.counters, self._drafts
        )
        self._launched: dict[int, tuple[list[Request], Steady | None]] = {}
        """Plan id -> the requests behind its rows, and the `Steady` that made it, if any."""
        self._planning = False
        self._news: list[TokenDelta] = []
        """Deltas not handed over yet; kept here, so that no failure loses them."""
        self._turns = Turns(limits, cache, self._requests.kv, hooks, self._drafts)

    def attach(self, call: HookCall) -> None:
        """Give the features access to KV blocks, and to their worker halves by `call` (`WorkerPort.call_hook`).

        Called once, when the worker is there.
        """
        requests = self._requests
        for hook in self._hooks:
            hook.attach(Pages(hook.name, self.cache, requests.shortage, self._loads, call, requests.kv.names))

    # Adding and ending requests

    def add(self, spec: GenerateRequest) -> None:
        """Queue a request.

        Raises:
            InvalidRequestError: it can never fit, or its id is in use.
        """
        if spec.id in self:
            raise id_in_use(spec.id)
        lockstep, held = lockstep_of(spec, self._hooks), 0
        if spec.options:
            spec = extended(namespaced(spec, self._hooks, self._life), self._hooks)
            held = held_blocks(spec, self._hooks)
        max_tokens = checked_max_tokens(spec, self.cache, self.limits, lockstep, held)
        choices = make_siblings(spec, max_tokens, self._eos, self._seeds, self._num_arrivals, lockstep)
        self._num_arrivals += len(choices)
        self._requests.add(choices)
        if spec.options:
            added(self._hooks, choices)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    def abort(self, request_id: str | None, index: int | None = None) -> list[TokenDelta]:
        """End a request (None: all), or one choice of it; ended requests and unknown ids are ignored."""
        for request in list(self._requests.choices(request_id, index)):
            self._end(request, FinishReason.ABORT)
        return self._take_news()

    def recover(self, error: str) -> list[TokenDelta]:
        """Recover from a failed step: all launched steps are lost, and all cached contents are dropped.

        If only one request can be at fault, it ends with the error. Otherwise all suspects are recomputed from their
        tokens, one request and one step at a time, before anything else runs; see `Quarantine`. Requests that were not
        in flight keep their state, unless planning failed, which may have changed any request's blocks.
        """
        self._launched.clear()
        self.cache.lost()
        self._turns.clear()
        guilty = self._guilty()
        seated = (r for r in self._requests.choices(None, None) if r.slot >= 0)  # `running` may be half written
        lost = [r for r in seated if r.inflight or self._planning]
        self._planning = False
        self.counters.stats.num_preemptions += sum(r.finish is None for r in lost)
        self._requests.rebuild(lost)
        if self._tiers is not None:
            self._tiers.lost()
        self._loads.lost()
        told(self._hooks, "on_failure")
        for request in guilty:
            self._end(request, FinishReason.ERROR, error=error)
        return self._take_news()

    def _guilty(self) -> list[Request]:
        """Return the requests that end because a step failed; others may become suspects."""
        requests, at = self._requests, self._planner.at if self._planning else None
        held = {r: r.inflight for r in requests.running if r.inflight}
        alive = {r: steps for r, steps in held.items() if r.finish is None}
        if at is None and sum(held.values()) > 1:
            return self._quarantine.enter(alive)
        if at is None and self._planning and not held:  # end one request, or planning might fail forever
            at = self._quarantine.current or requests.waiting.peek() or next(iter(requests.running), None)
        self._quarantine.convicted()
        return list(alive) if at is None else [at]

    def park(self) -> None:
        """Preempt all running requests and drop cached contents. Nothing may be in flight."""
        for request in list(self._requests.running):
            self._planner.preempt(request)
        self._turns.clear()
        if self._tiers is not None:
            self._tiers.clear()
        told(self._hooks, "on_park")
        self.reset()

    def reset(self) -> None:
        """Drop cached contents. Running requests keep their blocks."""
        self._requests.kv.reset()
        told(self._hooks, "on_reset")

    def has_blocks(self, *, there: bool) -> None:
        """The memory of the KV cache was freed, or allocated again."""
        self._loads.possible = there

    def weights_replaced(self) -> None:
        """The model has other weights now; nothing is in flight."""
        self._turns.clear()
        told(self._hooks, "on_weights")

    def lessees(self) -> list[str]:
        """Return the owners of leases that outlast `park`; give up prefixes that were loaded for waiting requests."""
        while self._requests.kv.let_go():
            pass
        return sorted({lease.owner for lease in self.cache.leases if not is_pages(lease)})

    def enter(self, realm: str) -> None:
        """Exchange pages with tiers under this name of the model and its weights; see `BlockNames`."""
        if self._tiers is not None:
            self._tiers.enter(realm)

    def fail_head(self, error: str) -> list[TokenDelta]:
        """End the first waiting request with an error."""
        request = self._requests.waiting.peek()
        if request is not None:
            self._end(request, FinishReason.ERROR, error=error)
        return self._take_news()

    def take_refused(self) -> list[TokenDelta]:
        """End the requests that a feature refused or failed on while the last step was planned."""
        for request, error in self._planner.refused:
            refused = (error.param or "") if isinstance(error, InvalidRequestError) else None
            text = error.message if isinstance(error, InvalidRequestError) else str(error)
            self._end(request, FinishReason.ERROR, error=text, refused=refused)
        self._planner.refused = []
        return self._take_news()

    @property
    def has_work(self) -> bool:
        return bool(self._requests.running) or bool(self._requests.waiting)

    @property
    def transferring(self) -> bool:
        """Whether transfers hold blocks, so that steps go on even if nothing is computed."""
        return self._loads.active or (self._tiers is not None and self._tiers.active)

    @property
    def storing(self) -> bool:
        """Whether pages are on their way to a tier, which needs no blocks any more; see `EngineLoop.idle`."""
        return self._tiers is not None and self._tiers.storing

    @property
    def is_stuck(self) -> bool:
        """Whether a request waits although nothing runs, no block is leased and no feature delays it. Never true, by
        design."""
        waits = bool(self._requests.waiting) and not self._planner.deferred and not self.transferring
        if not waits or self._requests.running or self._quarantine:
            return False
        return all(is_pages(lease) for lease in self.cache.leases)

    def call(self, feature: str, method: str, args: Mapping[str, Any]) -> Any | Future[Any]:
        """Call `EngineHook.call` of a feature. Raise InvalidRequestError if there is none of this name."""
        hook = next((hook for hook in self._hooks if hook.name == feature), None)
        if hook is None:
            raise InvalidRequestError(
                f"This engine does not have the feature {feature!r}.", param="feature", value=feature
            )
        return hook.call(method, args)

    # Plan

    def plan(self) -> StepPlan | None:
        """Plan the next step; None if nothing can be computed."""
        self.turn()
        self._planning = True
        draft, rows, steady = self._repeat() or self._decide()
        plan = self._freeze(draft, rows, steady)
        self._planning = False
        return plan

    def plan_transfers(self) -> StepPlan | None:
        """A step that computes nothing; None if no transfer needs one."""
        self.turn()
        return self._freeze(PlanDraft(), [])

    def turn(self) -> None:
        """Let features take in what their threads have done; call it while nothing is planned."""
        told(self.turning, "turn")
        self._mend()

    def _freeze(self, draft: PlanDraft, rows: list[Request], steady: Steady | None = None) -> StepPlan | None:
        if self._tiers is not None or self._loads.active:
            ask = not rows and not self._computing
            tiers = None if self._tiers is None else self._tiers.take(ask=ask)
            draft.transfers = merged(tiers, self._loads.take(ask=ask))
        if not rows and draft.transfers is None:
            return None
        for hook in () if not rows else self._hooks if steady is None else steady.hooks:
            hook.on_plan(draft, rows)
        plan = draft.freeze(self._num_plans)
        self._num_plans += 1
        self._launched[plan.id] = rows, steady
        self.cache.launched(plan.id)
        if self._tiers is not None:
            self._tiers.launched(plan.id)
        return plan

    @property
    def _computing(self) -> bool:
        """Whether a launched step has rows."""
        return any(rows for rows, _ in self._launched.values())

    def _repeat(self) -> tuple[PlanDraft, list[Request], Steady | None] | None:
        """Repeat an earlier step, if nothing else can follow; else None."""
        found = None if self._requests.waiting else self._turns.next(len(self._launched))
        if found is None:
            return None
        draft, steady = found
        if steady is None:
            return draft, [], None
        rows = len(steady.rows)
        self.counters.step(rows, rows, 0, rows, self._turns.unfilled)
        return draft, steady.rows, steady

    def _decide(self) -> tuple[PlanDraft, list[Request], None]:
        """Plan a step from scratch."""
        step = self._planner.decide(in_flight=self._computing)
        running, draft = self._requests.running, step.draft
        unfilled = self.counters.unfilled(running) if step.rows else 0
        if step.rows:
            tokens, sampled = sum(draft.num_tokens), sum(draft.samples)
            self.counters.step(len(step.rows), tokens, step.num_prompt_tokens, sampled, unfilled)
        if step.rows and not self._requests.waiting and not self._quarantine:
            self._turns.add(step, running, unfilled)
        else:
            self._turns.clear()
        return draft, step.rows, None

    def payload(self, plan: StepPlan) -> dict[str, Any]:
        """Return the features' payloads for sampling the plan; called after its forward pass was launched."""
        rows, steady = self._launched[plan.id]
        hooks = () if not rows else self._hooks if steady is None else steady.senders
        asked = ((hook.name, hook.before_sample(plan, rows)) for hook in hooks)
        return {name: value for name, value in asked if value is not None}

    def awaits_tokens(self, plan: StepPlan) -> bool:
        """Whether a launched plan has rows whose earlier tokens are still being sampled."""
        return any(request.inflight > 1 for request in self._launched[plan.id][0])

    def names_of(self, plan: StepPlan) -> dict[int, str]:
        """Return slot -> request id and choice of the requests that take slots with a launched plan."""
        requests = {request.slot: request for request in self._launched[plan.id][0]}
        return {row.slot: f"{requests[row.slot].id}/{requests[row.slot].index}" for row in plan.new}

    # Commit

    def commit(self, plan: StepPlan, output: StepOutput) -> list[TokenDelta]:
        """Process a step's output: end requests that are done, and return the deltas of all.

        The step has run, so a row that can't be processed fails its own request only.
        """
        self.counters.idle(output.idle_s)
        rows, steady = self._launched.pop(plan.id)
        self.cache.finished(plan.id)
        if self._tiers is not None:
            self._tiers.committed(plan.id, output.moved)
        if output.moved:
            self._loads.committed(output.moved)
        plain = not (output.errors or output.logprobs or output.drafts)
        if steady is not None and plain and self._turns.has(steady):
            self.counters.stats.generation_tokens += len(rows)
            steady.take(output.tokens, self._news, self._append, self._fail)
            return self._take_news()
        for row, request in enumerate(rows):
            request.inflight -= 1
            try:
                self._take_row(request, plan, output, row)
            except Exception as error:  # ends this request only
                self._fail(request, error)
        return self._take_news()

    def _take_row(self, request: Request, plan: StepPlan, output: StepOutput, row: int) -> None:
        if row in output.prompt_logprobs and request.finish is None:
            self._news += prompt_news(request, output.prompt_logprobs[row])
        if plan.samples[row]:
            self._take(request, plan.num_drafts[row], plan.num_tokens[row], output, row)
        elif request.finish is None and not request.inflight and request.certain_to_finish:
            self._answer(request, output, row)
        if request.finish is not None and not request.inflight and request.slot >= 0:
            self._requests.release(request)

    def _fail(self, request: Request, error: Exception) -> None:
        """End a request whose row could not be processed, if it has not ended by now."""
        log.error("failed to process the output of request %s; the request ends", request.id, exc_info=error)
        self._turns.clear()
        self._requests.rebuild()  # first: its blocks, or the end of a request, may be half changed
        self._end(request, FinishReason.ERROR, error=internal_error(error))

    def _mend(self) -> None:
        """Rebuild block counts if the cache failed inside a feature's call: that is caught and ends no step."""
        if self.cache.miscounted:
            self._turns.clear()
            self._requests.rebuild()

    def _take_news(self) -> list[TokenDelta]:
        self._mend()
        news, self._news = self._news, []
        return news

    def _take(self, request: Request, num_drafts: int, num_tokens: int, output: StepOutput, row: int) -> None:
        """Process what a row of `num_tokens` sampled."""
        sampled = output.tokens[row]
        self._quarantine.passed(request)
        self._drafts.verified(request, num_drafts, num_tokens, len(sampled))
        if row in output.drafts and not request.inflight:
            request.num_drafts = min(request.num_drafts, output.drafts[row])
        error, found = output.errors.get(row), output.logprobs.get(row)
        if request.finish is not None:
            return
        if error is not None:
            self._end(request, FinishReason.ERROR, error=error)
        elif request.siblings.lockstep is not None and found:
            self._report(request, found[0])
        else:
            if num_drafts:
                for hook in self._hooks:
                    hook.on_verify(request, num_drafts, len(sampled) - 1)
            before = request.num_output
            self._append(request, sampled, found)
            self.counters.stats.generation_tokens += request.num_output - before
            if row in output.drafted and request.finish is None:
                valid = self._drafts.valid(request, output.drafted[row])
                if not request.inflight:
                    request.num_drafts = min(request.num_drafts, valid)

    def _report(self, request: Request, found: TokenLogprobs) -> None:
        """Process a sequence's part of a round in lockstep; after the last round all siblings end."""
        for one, ending in request.siblings.report(request, found, self.cache):
            one.first_token = time.monotonic()
            self._finish(one, ending.reason, Last(ending.tokens, found=ending.found))
            if one.index < one.params.n:
                self.counters.stats.generation_tokens += len(ending.tokens)

    def _end(
        self, request: Request, reason: FinishReason, *, error: str | None = None, refused: str | None = None
    ) -> None:
        """End a request early, if it has not ended, with the siblings in lockstep with it."""
        for one in request.siblings.ending_with(request):
            if one.finish is None:
                self._finish(one, reason, Last(error=error, refused=refused))

    def _answer(self, request: Request, output: StepOutput, row: int) -> None:
        """End a request whose prompt is computed and that samples nothing, with the features' results."""
        self._quarantine.passed(request)
        error, found = output.errors.get(row), output.found.get(row)
        if error is not None:
            self._end(request, FinishReason.ERROR, error=error)
        else:
            self._finish(request, FinishReason.STOP, Last(complete=True, found=found))

    def _append(self, request: Request, sampled: list[int], logprobs: list[TokenLogprobs] | None) -> None:
        tokens: list[int] = []
        each = len(sampled) > 1 and bool(hooks_of(request, self._readers))  # a feature may end it at any token
        for part in [[token] for token in sampled] if each else [sampled]:
            more, reason = append(request, part)
            tokens += more
            complete, failed = committed(self._hooks, request, more)
            if complete or failed is not None or reason is not None:
                break
        times = times_at_first_token(request)
        kept = None if logprobs is None else logprobs[: len(tokens)]
        if failed is not None:
            self._finish(request, FinishReason.ERROR, Last(tokens, kept, error=failed))
        elif complete and reason is not FinishReason.STOP:
            self._finish(request, FinishReason.STOP, Last(tokens, kept, complete=True))
        elif reason is not None:
            self._finish(request, reason, Last(tokens, kept))
        else:
            self._news.append(TokenDelta(request.id, request.index, tokens, kept, request.num_cached, times=times))

    def _finish(self, request: Request, reason: FinishReason, last: Last) -> None:
        """End a request; emit its last delta unless its index is beyond `n`. No other place ends one."""
        if request.spec.options and (found := results(self._hooks, request)):
            last = replace(last, found=found | (last.found or {}))
        news = last_news(request, reason, self._eos, last)
        if request.index < request.params.n:
            self._news.append(news)
        request.finish = reason
        self._turns.drop({request})
        self._requests.end(request)

    # Statistics

    def stats(self) -> EngineStats:
        """Return the counters with current gauges."""
        running, waiting = self._requests.running, len(self._requests.waiting)
        unfilled = self._turns.unfilled if self._turns.complete else self.counters.unfilled(running)
        stats = self.counters.snapshot(len(running), waiting, len(self._planner.deferred), unfilled)
        stats.feature_changed = next((hook.name for hook in self._hooks if hook.changed), "")
        stats.features = [metric for hook in self._hooks for metric in measured(hook)]
        delayed = [*filter(None, [self._requests.waiting.peek()]), *self._planner.deferred[:_MOST_WAITS]]
        stats.waits = {request.id: text for request in delayed if (text := reason(self._hooks, request))}
        return stats

    def check_idle(self, *, books: bool = True) -> None:
        """Raise AssertionError if blocks are held although no request is alive; see `KVCache.check_empty`."""
        self.cache.check_empty(len(self._requests), books=books)

    def forget_past(self) -> None:
        """Drop cached contents, except those of features, and counters. Nothing may be running."""
        self.cache.reset()
        self.counters.forget()
