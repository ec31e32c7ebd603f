"""`Planner`: which requests get how many of their tokens computed in the next step.

There is no prefill and no decode here. Every request has `uncomputed` tokens; a step computes as many of them as the
budget and the KV cache allow. A new prompt, a chunk of one, a decode, a draft check and a resume after preemption
differ only in that number.
"""

from __future__ import annotations

from collections.abc import Sequence

from octavo.cache.cache import KVCache
from octavo.core.errors import InvalidRequestError
from octavo.schedule.counters import Counters
from octavo.schedule.drafts import DraftBounds
from octavo.schedule.hooks import NO_ROOM, EngineHook, admitted
from octavo.schedule.limits import Limits
from octavo.schedule.policy import Pace, Policy, displaced_by, victim_of
from octavo.schedule.quarantine import Quarantine
from octavo.schedule.queue import Rank
from octavo.schedule.request import Request
from octavo.schedule.requests import Requests
from octavo.schedule.siblings import yielding
from octavo.schedule.step_builder import AdmitResult, StepBuilder
from octavo.schedule.watcher import PreemptionCause

_NO_BUDGET = NO_ROOM - 1
"""The step lacks budget for tokens that are computed together, so no other request may take it."""


class Planner:
    """Lays out steps, and admits and preempts requests for them.

    Attributes:
        deferred: requests that wait for something other than slots, tokens or blocks, as of the last step.
        refused: requests that a feature refused or failed on, each with its error; the caller ends them.
        at: the request being planned, so that a failure is attributed to it.
    """

    def __init__(
        self,
        requests: Requests,
        cache: KVCache,
        limits: Limits,
        policy: Policy,
        hooks: Sequence[EngineHook],
        quarantine: Quarantine,
        counters: Counters,
        drafts: DraftBounds,
    ) -> None:
        self.deferred: list[Request] = []
        self.at: Request | None = None
        self.refused: list[tuple[Request, InvalidRequestError | RuntimeError]] = []
        self._requests = requests
        self._cache = cache
        self._limits = limits
        self._policy = policy
        self._hooks = hooks
        self._unsent = frozenset(hook.name for hook in hooks if not hook.sends_options)
        self._quarantine = quarantine
        self._counters = counters
        self._drafts = drafts
        self._kv = requests.kv
        self._paced = policy.spreads_prompts and limits.paced_tokens > 0

    def decide(self, *, in_flight: bool) -> StepBuilder:
        """Build the next step; without rows if nothing can be computed.

        Args:
            in_flight: some launched steps are not committed yet.
        """
        self.at = None
        step = StepBuilder.empty(self._limits.max_num_batched_tokens, self._cache.ranks, self._unsent)
        alone = self._quarantine.current is not None
        if self._requests.waiting:
            self._policy.measure(self._requests.running)
        try:
            if alone:
                self._plan_alone(step, in_flight=in_flight)
            else:
                self._make_way(step)
                self._fill(step)
                while not step.rows and not in_flight and self._yield_one(step):
                    step.starved = None
                    self._fill(step)
        finally:
            self.deferred = step.deferred
            for request in step.deferred:
                self._requests.waiting.push(request)
        self.at = None
        left = 0 if self._quarantine.current is not None else len(self._requests.waiting) - len(self.deferred)
        head = self._requests.waiting.peek() if left else None
        tokens = 0 if step.rank_is_full else self._budget(step, head) if head else step.budget
        self._counters.left(left, self._requests.num_free_slots, tokens)
        self._counters.watchers.tell("planned", step, self._counters.stats.waits_for, self._counters.stats)
        return step

    def preempt(
        self, request: Request, cause: PreemptionCause = PreemptionCause.PARKED, by: Request | None = None
    ) -> None:
        """Return a request to the waiting queue, for `by`; it recomputes what the prefix cache no longer holds."""
        self._counters.stats.num_preemptions += 1
        self._requests.preempt(request, cause, by)

    def _fill(self, step: StepBuilder) -> None:
        if self._paced:
            head = self._requests.waiting.peek()
            step.pace = Pace.of(self._limits.paced_tokens, [*self._requests.running, *([head] if head else [])])
        self._plan_running(step)
        self._plan_waiting(step)

    def _plan_running(self, step: StepBuilder) -> None:
        """Plan rows of running requests by rank: decodes first, so that no prompt delays them, then prompts.

        A waiting request that ranks before a running one with prompt left is admitted before it.
        """
        small: list[Request] = []
        large: list[Request] = []
        for request in self._requests.running:
            if request.siblings.holds(request) or (self._drafts.rewinds and request.unsure):
                continue
            if request.finish is None and request.inflight < self._limits.max_ahead and not request.certain_to_finish:
                (small if request.uncomputed <= 1 + request.num_drafts else large).append(request)
        for request in small if self._limits.turns == 1 else self._next_turn(small):
            if self._may_run(step, request):
                self._plan_row(step, request)
        for request in large:
            if request.slot < 0:  # preempted by a row of this step; `_plan_waiting` may admit it again
                continue
            self._plan_waiting(step, before=self._policy.rank(request))
            if self._may_run(step, request):
                self._plan_row(step, request)

    def _next_turn(self, small: Sequence[Request]) -> list[Request]:
        """Return this step's share of the requests that decode: those whose tokens are all known, at most an equal part
        of all. The others are in flight, or have the next turn."""
        known = [request for request in small if not request.pending]
        decoding = len(known) + sum(request.pending > 0 for request in self._requests.running)
        return known[: -(-decoding // self._limits.turns)]

    def _may_run(self, step: StepBuilder, request: Request) -> bool:
        preempted = request.slot < 0 or request in step.yielding
        return not preempted and (step.starved is None or self._policy.rank(request) < step.starved)

    def _plan_row(self, step: StepBuilder, request: Request) -> None:
        self.at = request
        num_tokens = self._allowed(step, request)
        if num_tokens <= 0:
            if num_tokens == _NO_BUDGET:  # others would take what the next steps have left, too
                step.starved = self._policy.rank(request)
            return
        while not self._add_row(step, request, num_tokens):
            certain = request.uncomputed - request.num_drafts
            if num_tokens > certain:  # drafts are not worth another request's blocks
                num_tokens = certain
                continue
            lacking = self._cache.missing(request.table, request.num_computed, request.num_computed + num_tokens)
            if self._kv.let_go() or self._kv.reclaim(max(1, lacking - self._cache.free_for(request.table)), request):
                continue
            victim = victim_of(request, self._requests.running, set(step.rows), self._policy)
            if victim is None:
                step.starved = self._policy.rank(request)
                return
            self.preempt(victim, PreemptionCause.KV_BLOCKS, request)

    def _plan_waiting(self, step: StepBuilder, before: Rank | None = None) -> None:
        """Admit waiting requests by rank while they fit; with `before`, only those of a lower rank."""
        waiting = self._requests.waiting
        while step.starved is None and step.budget > 0 and self._requests.num_free_slots:
            request = waiting.peek()
            if request is None or (before is not None and self._policy.rank(request) > before):
                return
            if self._budget(step, request) <= 0:
                return
            admission = self._admit(step, request)
            if admission is AdmitResult.FULL:
                return
            waiting.pop()
            if admission is AdmitResult.WAIT:
                step.deferred.append(request)

    def _admit(self, step: StepBuilder, request: Request) -> AdmitResult:
        """Give a waiting request the KV it can share, a slot, and its first row."""
        self.at = request
        if not self._kv.share(request, step.prompts):
            return AdmitResult.WAIT
        shared = request.num_computed
        if step.left_for(request) <= 0:
            self._kv.unshare(request)
            step.rank_is_full = True
            return AdmitResult.FULL
        num_tokens = self._allowed(step, request)
        if num_tokens <= 0 or not self._fits(request):
            self._kv.unshare(request)
            waits = NO_ROOM < num_tokens <= 0 and not self._limits.whole_prompts
            return AdmitResult.WAIT if waits else AdmitResult.FULL
        if self._kv.load(request):
            self._kv.unshare(request)
            return AdmitResult.WAIT
        self._requests.start(request)
        if not self._add_row(step, request, num_tokens):
            raise AssertionError(f"no KV block for request {request.id}, although its shortage was 0")
        step.add_new(request, shared)
        self._counters.admission(request, shared)
        return AdmitResult.DONE

    def _fits(self, request: Request) -> bool:
        """Whether there are blocks to admit the request, after features gave back those that it lacks."""
        running = len(self._requests.running)
        shortage = self._kv.shortage(request, running)
        return shortage <= 0 or (self._kv.reclaim(shortage, request) and self._kv.shortage(request, running) <= 0)

    def _admit_if_slot(self, step: StepBuilder, request: Request) -> AdmitResult:
        return self._admit(step, request) if self._requests.num_free_slots else AdmitResult.FULL

    def _budget(self, step: StepBuilder, request: Request) -> int:
        """Return the tokens that the step has left for a request of any rank; a prompt that can wait may get fewer."""
        if step.pace is None or request.uncomputed <= 1 + request.num_drafts:
            return step.budget
        return step.pace.allowed(request, step.num_tokens, step.budget)

    def _allowed(self, step: StepBuilder, request: Request) -> int:
        """Return how many tokens the request computes in this step. Drafts that do not fit the budget are dropped.

        `_NO_BUDGET` if the step lacks budget for tokens that must be computed together.
        """
        num_tokens = min(request.uncomputed, self._budget(step, request), step.left_for(request))
        num_tokens = self._cache.chunk(request.num_computed, num_tokens)
        if self._limits.whole_prompts and num_tokens < request.uncomputed:
            return 0
        if request.spec.unbroken:
            num_tokens = self._unbroken(step, request, num_tokens)
            if num_tokens == _NO_BUDGET:
                return num_tokens
        asked = num_tokens
        num_tokens, error = admitted(self._hooks, request, num_tokens)
        if error is not None:
            self.refused.append((request, error))
        elif 0 < num_tokens < asked and (cut := request.unbroken_at(request.num_computed + num_tokens)) is not None:
            num_tokens = max(0, cut[0] - request.num_computed)
        return num_tokens

    def _unbroken(self, step: StepBuilder, request: Request, num_tokens: int) -> int:
        """Return how many of the next `num_tokens` of a request to compute without cutting a range of them that belongs
        together. If they begin with one, it is all of it, if the step has as much budget left."""
        start = request.num_computed
        cut = request.unbroken_at(start + num_tokens)
        if cut is None or cut[0] > start:
            return num_tokens if cut is None else cut[0] - start
        rest = cut[1] - start
        return rest if rest <= min(step.budget, step.left_for(request)) else _NO_BUDGET

    def _add_row(self, step: StepBuilder, request: Request, num_tokens: int) -> bool:
        """Add a row for a request with a slot; return False, with nothing changed, if too few blocks are free."""
        start, end = request.num_computed, request.num_computed + num_tokens
        certain = request.uncomputed - request.num_drafts
        samples = num_tokens >= certain and request.max_tokens > 0
        drafts = num_tokens - certain if samples else 0
        rewinds = drafts > 0 and self._drafts.rewinds
        growth = self._cache.grow(request.table, start, end, oldest=start - request.pending, keeps_states=rewinds)
        if growth is None:
            return False
        step.add_row(request, num_tokens, growth, samples=samples, drafts=drafts)
        if request.siblings.take_moved(request):
            step.add_new(request, start)
        request.num_computed = end
        request.inflight += 1
        if samples:
            request.pending += 1 + drafts
            request.unsure += drafts
            request.num_drafts = 0
            if self._drafts.most:
                self._propose(step, request)
        if not rewinds:  # the row may be computed again, and registered blocks would be copied
            self._kv.register(request)
        return True

    def _propose(self, step: StepBuilder, request: Request) -> None:
        """Ask for drafts after the tokens of the row that was just added."""
        request.num_drafts = self._drafts.following(request, len(self._requests.running))
        if request.num_drafts and self._drafts.writes_ahead and not self._reserve_drafts(step, request):
            request.num_drafts = 0
        if request.num_drafts:
            step.draft.proposals[len(step.rows) - 1] = request.num_drafts
            step.draft.reports_drafts |= self._drafts.reads(request)

    def _reserve_drafts(self, step: StepBuilder, request: Request) -> bool:
        """Add the blocks of the sampled token and of the drafts after it; return False if too few are free."""
        start = request.num_computed
        growth = self._cache.grow(request.table, start, start + request.num_drafts, oldest=0)  # this step still reads
        if growth is None:
            return False
        step.draft.copies.extend(growth.copies)
        step.draft.block_writes.extend((request.slot, *write) for write in growth.writes)
        return True

    # After a failure

    def _plan_alone(self, step: StepBuilder, *, in_flight: bool) -> None:
        """Plan a step with a single row, of a suspected request, when nothing else is in flight."""
        turns = 0 if in_flight else len(self._quarantine)
        for _ in range(turns):
            suspect = self._quarantine.current
            if suspect is None or self._plan_suspect(step, suspect):
                return
            self._quarantine.postpone()

    def _plan_suspect(self, step: StepBuilder, suspect: Request) -> bool:
        """Plan the suspect's row, preempting other requests as needed; return whether it got one."""
        requests = self._requests
        others = sorted((r for r in requests.running if r is not suspect), key=self._policy.victim_rank)
        if suspect.slot < 0:
            while (found := self._admit_if_slot(step, suspect)) is AdmitResult.FULL and self._take_room(
                others, suspect
            ):
                pass
            if found is AdmitResult.DONE:
                requests.waiting.remove(suspect)
            return found is AdmitResult.DONE
        num_tokens = self._allowed(step, suspect)
        while num_tokens > 0 and not self._add_row(step, suspect, num_tokens):
            if not self._take_room(others, suspect):
                return False
        return num_tokens > 0

    def _take_room(self, others: list[Request], suspect: Request) -> bool:
        """Free loaded blocks that no request uses yet, or blocks of features, or else preempt the last of `others`,
        which is removed.

        Returns:
            False if there was nothing to free.
        """
        if self._kv.let_go() or self._kv.reclaim(1, suspect):
            return True
        if others:
            self.preempt(others.pop(), PreemptionCause.SUSPECT, suspect)
            return True
        return False

    # Preemption

    def _make_way(self, step: StepBuilder) -> None:
        """If the first waiting request does not fit but may displace running ones, preempt as few as necessary.

        All victims are preempted together: while any has steps in flight, all get no row and are preempted later.
        """
        running = self._requests.running
        first = self._requests.waiting.peek()
        last = running[-1:] if self._policy.displaces_last else running
        if first is None or not any(self._policy.displaces(first, other) for other in last):
            return
        self.at = first
        if not self._kv.share(first, step.prompts):
            return
        self._fits(first)
        shortage = self._kv.shortage(first, len(running))
        victims: list[Request] = []
        if (shortage > 0 or not self._requests.num_free_slots) and self._allowed(step, first) > 0:
            victims = displaced_by(first, running, shortage, self._policy, self._cache)
        self._kv.unshare(first)
        if any(victim.inflight for victim in victims):
            step.yielding.update(victims)
        else:
            for victim in victims:
                self._policy.displaced(victim)
                self.preempt(victim, PreemptionCause.PRIORITY, first)

    def _yield_one(self, step: StepBuilder) -> bool:
        """Free blocks when nothing runs because loaded prefixes, or sequences that wait for a sibling in lockstep, hold
        them.

        Returns:
            Whether any were freed.
        """
        if self._kv.let_go():
            return True
        head = self._requests.waiting.peek()
        needy = (step.starved, self._policy.rank(head) if head else None)
        ranks = [rank for rank in needy if rank is not None]
        if not ranks:
            return False
        victim = yielding(self._requests.running, lambda r: self._policy.rank(r) > min(ranks))
        if victim is not None:
            self.preempt(victim, PreemptionCause.KV_BLOCKS, head)
        return victim is not None
