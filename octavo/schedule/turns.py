"""`Turns`: the steps that decode, which repeat in turn until something changes.

Without a pipeline one step has all running requests. Stages of a pipeline compute several steps at once, each of other
requests, so that the requests are divided over as many steps; each is repeated once its tokens are known.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence, Set

from octavo.cache.cache import KVCache
from octavo.core.plan import PlanDraft
from octavo.schedule.drafts import DraftBounds
from octavo.schedule.hooks import EngineHook
from octavo.schedule.kv_planner import KvPlanner
from octavo.schedule.limits import Limits
from octavo.schedule.request import Request
from octavo.schedule.steady import Steady
from octavo.schedule.step_builder import StepBuilder


class Turns:
    """Repeats the steps of the running requests while together they have each request once.

    Attributes:
        unfilled: token slots in the blocks of the running requests that hold no token; valid while `complete`.
    """

    def __init__(
        self, limits: Limits, cache: KVCache, kv: KvPlanner, hooks: Sequence[EngineHook], drafts: DraftBounds
    ) -> None:
        self.unfilled = 0
        self.complete = False
        self._steps: deque[Steady] = deque()
        """In the order of their launches; no two have the same request."""
        self._limits = limits
        self._cache = cache
        self._kv = kv
        self._hooks = hooks
        self._drafts = drafts
        self._allowed = all(hook.opt_in for hook in hooks)

    def clear(self) -> None:
        """Forget all steps: something has changed, and the next ones are planned from scratch."""
        self._steps.clear()
        self.complete = False

    def drop(self, requests: Set[Request]) -> None:
        """Forget the steps that have one of these requests: they are planned from scratch."""
        kept = deque(one for one in self._steps if one.requests.isdisjoint(requests))
        self.complete = self.complete and len(kept) == len(self._steps)
        self._steps = kept

    def has(self, steady: Steady) -> bool:
        """Return whether nothing has changed for the requests of `steady` since its steps began."""
        return any(one is steady for one in self._steps)

    def add(self, step: StepBuilder, running: Sequence[Request], unfilled: int) -> None:
        """Take in a step that was planned from scratch, while nothing waits.

        Args:
            unfilled: token slots in the blocks of the `running` requests that hold no token.
        """
        self.drop(set(step.rows))
        self.complete = False
        turns, share = self._limits.turns, -(-len(running) // self._limits.turns)
        if not self._allowed or len(step.rows) > share or (turns == 1 and len(step.rows) < share):
            return
        steady = Steady.after(step, self._limits, self._cache, self._kv, self._hooks, self._drafts)
        if steady is None:
            return
        if steady.rows != [request for request in running if request in steady.requests]:
            return  # a new request is last in its first step only
        self._steps.append(steady)
        self.unfilled = unfilled
        sizes = [len(one.rows) for one in self._steps]
        self.complete = sum(sizes) == len(running) and max(sizes) <= share

    def next(self, in_flight: int) -> tuple[PlanDraft, Steady | None] | None:
        """Return the next step and what repeats it; a step without rows if all requests are in flight; None if it must
        be planned from scratch.

        Args:
            in_flight: launched steps whose tokens are not known.
        """
        if not self.complete:
            return None
        steady = self._steps[0]
        if self._limits.turns > 1 and steady.rows[0].inflight:
            return PlanDraft(), None
        draft = steady.next() if in_flight < self._limits.max_ahead else None
        if draft is None:
            return None
        self._steps.rotate(-1)
        self.unfilled += steady.unfilled
        return draft, steady
