"""`Steady`: repeat a step that decodes one token of each of its requests, for as long as nothing else can happen.

A repeated step may ask for drafts where the next plan is made after its tokens are known; if some are found, the next
step is planned from scratch.

Most steps are such steps, and the scheduler need not examine each request again: none waits, none is about to reach its
limit, and a request needs a KV block only when it fills one. The block being written is never shared: a sharer copies
it on its first write. Features are called only for requests with options for them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from octavo.cache.cache import KVCache
from octavo.core.output import TokenDelta
from octavo.core.plan import PlanDraft
from octavo.schedule.drafts import DraftBounds
from octavo.schedule.hooks import EngineHook, hooks_of
from octavo.schedule.kv_planner import KvPlanner
from octavo.schedule.limits import Limits
from octavo.schedule.request import Request
from octavo.schedule.step_builder import StepBuilder

Append = Callable[[Request, list[int], None], None]
Fail = Callable[[Request, Exception], None]


class Steady:
    """Successive decode steps of the same requests.

    Attributes:
        rows: the requests, in the order of the batch.
        requests: the same as a set.
        hooks: the features to call for these steps.
        senders: those of them that may have payloads for sampling.
        unfilled: token slots that the last step added to the rows' blocks, less those that it filled.
    """

    def __init__(
        self,
        step: StepBuilder,
        limits: Limits,
        cache: KVCache,
        kv: KvPlanner,
        hooks: Sequence[EngineHook],
        drafts: DraftBounds,
    ) -> None:
        self.rows = list(step.rows)
        self.requests = frozenset(step.rows)
        self.unfilled = 0
        self._draft = step.draft
        self._cache = cache
        self._growing = sum(group.grows for group in cache.groups)
        self._kv = kv
        self._drafts = drafts if drafts.most else None
        self._repeats = limits.turns == 1  # else steps of other requests are in between
        self._searches = (
            limits.max_ahead == 1 and not drafts.writes_ahead and not any(drafts.reads(r) for r in self.rows)
        )
        watched = {request for request in self.rows if request.spec.options}
        self.hooks = hooks if watched else ()
        self.senders = [hook for hook in self.hooks if type(hook).before_sample is not EngineHook.before_sample]
        reading = [hook for hook in self.hooks if type(hook).on_commit is not EngineHook.on_commit]
        self._watched = {request for request in watched if hooks_of(request, reading)}
        """Requests whose tokens features must see."""
        asked = [hook for hook in self.hooks if not hook.admits_for_good]
        self._asked = [(request, mine) for request in watched if (mine := hooks_of(request, asked))]
        self._left = min(r.max_tokens - r.num_output - r.pending for r in self.rows)
        self._count = 0
        self._told = [(r, r.spec.id, r.index, r.stop_ids, r.num_cached, _first_check(r)) for r in self.rows]
        self._borders: dict[int, list[tuple[Request, bool]]] = {}
        """Step number modulo the block size -> requests that start a block (True), or whose full block can be
        registered (False), because it is written or its last tokens are known."""
        for request in self.rows:
            fills = -request.num_computed
            for lag in range(max(2, limits.max_ahead)):
                self._borders.setdefault((fills + lag) % cache.block_size, []).append((request, lag == 1))

    @classmethod
    def after(
        cls,
        step: StepBuilder,
        limits: Limits,
        cache: KVCache,
        kv: KvPlanner,
        hooks: Sequence[EngineHook],
        drafts: DraftBounds,
    ) -> Steady | None:
        """Return the steps that repeat `step`, if it decodes one token of each of its requests; else None.

        None also while drafts are in flight, or may be once this step's tokens are known.
        """
        rows, draft = step.rows, step.draft
        if draft.num_tokens != [1] * len(rows) or not all(draft.samples) or any(draft.num_drafts):
            return None
        if any(r.unsure or r.siblings.lockstep for r in rows):
            return None
        steady = cls(step, limits, cache, kv, hooks, drafts)
        return steady if steady._searches or not draft.proposals else None

    def next(self) -> PlanDraft | None:
        """Return the next step and count it as launched; None if the scheduler must plan from scratch."""
        borders = self._borders.get((self._count + 1) % self._cache.block_size, ())
        grown = sum(begins for _, begins in borders)
        if self._left <= 0 or grown * len(self._cache.groups) > self._cache.least_free or not self._admitted():
            return None
        wanted = [] if self._drafts is None else self._wanted(self._drafts)
        if wanted is None or (any(wanted) and not self._searches):
            return None
        draft = PlanDraft(
            slots=self._draft.slots,
            num_tokens=self._draft.num_tokens,
            num_drafts=self._draft.num_drafts,
            samples=self._draft.samples,
            repeats=self._repeats,
        )
        for request in self.rows:
            request.num_computed += 1
            request.inflight += 1
            request.pending += 1
        if any(wanted):
            self._propose(draft, wanted)
        for request, begins in borders:
            if begins:
                self._grow(request, draft)
            self._kv.register(request)
        self.unfilled = self._growing * (grown * self._cache.block_size - len(self.rows))
        self._left -= 1
        self._count += 1
        return draft

    def _admitted(self) -> bool:
        """Return whether no feature delays a request; if one does or fails, the scheduler handles it."""
        try:
            return all(hook.admit(request, 1) > 0 for request, hooks in self._asked for hook in hooks)
        except Exception:
            return False

    def _wanted(self, drafts: DraftBounds) -> list[int] | None:
        """Return the most drafts that features want after each row. None if drafts wait, so that rows differ from now
        on, or if a feature fails; planning from scratch reports that."""
        if any(request.num_drafts for request in self.rows):
            return None
        try:
            return [drafts.wanted(request) for request in self.rows]
        except Exception:
            return None

    def _propose(self, draft: PlanDraft, wanted: list[int]) -> None:
        """Ask for drafts after the tokens of the rows. While none are found, steps continue to repeat."""
        assert self._drafts is not None
        for row, (request, most) in enumerate(zip(self.rows, wanted, strict=True)):
            request.num_drafts = self._drafts.following(request, len(self.rows), most)
            if request.num_drafts:
                draft.proposals[row] = request.num_drafts

    def _grow(self, request: Request, draft: PlanDraft) -> None:
        growth = self._cache.grow(request.table, request.num_computed - 1, request.num_computed)
        if growth is None:
            raise AssertionError(f"no KV block for request {request.id}, although one was free")
        draft.copies.extend(growth.copies)
        draft.block_writes.extend((request.slot, *write) for write in growth.writes)

    def take(self, tokens: list[list[int]], news: list[TokenDelta], append: Append, fail: Fail) -> None:
        """Append the token of each row.

        Args:
            tokens: one list of one token per row.
            news: receives the delta of each row as soon as the row is processed.
            append: processes a token that may end its row, or that features must see, and emits its delta.
            fail: ends a request whose token could not be processed, with the error.
        """
        may_be_full = self._left <= 0  # before that no row can have reached its limit
        for (request, name, index, stop_ids, num_cached, check), sampled in zip(self._told, tokens, strict=True):
            request.inflight -= 1
            request.pending -= 1
            try:
                full = may_be_full and request.num_output + 1 >= request.max_tokens
                circles = check is not None and request.num_output + 1 >= check
                if full or circles or sampled[0] in stop_ids or request in self._watched:
                    append(request, sampled, None)
                else:
                    request.tokens.append(sampled[0])
                    news.append(TokenDelta(name, index, sampled, None, num_cached))
            except Exception as error:  # ends this request only
                fail(request, error)


def _first_check(request: Request) -> int | None:
    """Return the output length from which a repetition may end the request; None without such a rule."""
    rule = request.params.repetition_detection
    return None if rule is None else rule.least
