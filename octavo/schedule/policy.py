"""Scheduling policies: the order of admission, the order of preemption, and which prompts can wait.

A policy is two orders over requests and one relation; the scheduler does the rest. Add a class here and to `POLICIES`:
the flag then offers it, and the property tests run with it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from octavo.cache.cache import KVCache
from octavo.core.errors import ConfigError
from octavo.core.request import BACKGROUND
from octavo.schedule.request import Request

Rank = tuple[int, ...]


class Policy(Protocol):
    """Two total orders. `rank` must not change during a request's life and must end in the arrival number;
    `victim_rank` may depend on what the request has computed.

    Attributes:
        spreads_prompts: whether prompts may wait for the steps that longer answers need anyway; see `Pace`.
    """

    spreads_prompts: bool

    def arrive(self, request: Request) -> None:
        """Set `request.turn`, if `rank` depends on when the request came. Called once, before the request waits."""
        ...

    def begin(self, request: Request) -> None:
        """Called when a request takes a slot; again after it was preempted."""
        ...

    def rank(self, request: Request) -> Rank:
        """Return the rank: a lower one runs and is admitted earlier, and is never preempted for a higher one."""
        ...

    def victim_rank(self, request: Request) -> Rank:
        """Return the order of preemption: the highest of the possible victims is preempted first."""
        ...

    def displaces(self, waiting: Request, running: Request) -> bool:
        """Return whether a waiting request may preempt a running one.

        True only if `running` ranks after `waiting`, and never in both directions, or the two would preempt each other
        in turns.
        """
        ...


class Fcfs:
    """First come, first served; the victim is the request with the least to recompute. Background work comes last."""

    spreads_prompts = False

    def arrive(self, request: Request) -> None:
        """Do nothing."""

    def begin(self, request: Request) -> None:
        """Do nothing."""

    def rank(self, request: Request) -> Rank:
        return (_in_background(request), request.order)

    def victim_rank(self, request: Request) -> Rank:
        return (_in_background(request), -request.num_computed, request.order)

    def displaces(self, waiting: Request, running: Request) -> bool:
        return _in_background(waiting) < _in_background(running)


class Priority(Fcfs):
    """Lower `priority` first, then first come; the victim is the cheapest request of the least urgent class.

    A new request preempts running requests of less urgent classes if it does not fit otherwise.
    """

    def rank(self, request: Request) -> Rank:
        return (request.spec.priority, request.order)

    def victim_rank(self, request: Request) -> Rank:
        return (request.spec.priority, -request.num_computed, request.order)

    def displaces(self, waiting: Request, running: Request) -> bool:
        return waiting.spec.priority < running.spec.priority


class LongestFirst(Fcfs):
    """The longest answer first (by `max_tokens`), to minimize the time until all requests are done.

    Requests that begin last end first, so no long answer decodes alone at the end. Background work comes last.
    """

    spreads_prompts = True

    def rank(self, request: Request) -> Rank:
        return (_in_background(request), -request.max_tokens, request.order)


class ShortestFirst(Fcfs):
    """The fewest tokens of prompt and `max_tokens` first, for the least mean time of a request (Smith 1956, "Various
    Optimizers for Single-Stage Production"). Background work comes last.

    Requests age: a later one overtakes a waiting one only if it has fewer tokens by more than those of all requests
    that began in between, so none waits forever.
    """

    def __init__(self) -> None:
        self._begun = 0
        """Tokens of all requests that have begun."""

    def arrive(self, request: Request) -> None:
        request.turn = self._begun + _expected(request)

    def begin(self, request: Request) -> None:
        if not request.num_preemptions:
            self._begun += _expected(request)

    def rank(self, request: Request) -> Rank:
        return (_in_background(request), request.turn, request.order)


def _expected(request: Request) -> int:
    """Return the most tokens that a request computes; the choices after the first one share its prompt."""
    return request.max_tokens + (0 if request.index else request.num_prompt)


def _in_background(request: Request) -> bool:
    return request.spec.priority >= BACKGROUND


POLICIES: Mapping[str, type[Policy]] = {
    "fcfs": Fcfs,
    "priority": Priority,
    "shortest-first": ShortestFirst,
    "longest-first": LongestFirst,
}


def make_policy(name: str) -> Policy:
    """Return a new policy.

    Raises:
        ConfigError: the name is not in `POLICIES`.
    """
    if name not in POLICIES:
        raise ConfigError(f"--scheduling-policy {name!r} is not known; choose one of: {', '.join(POLICIES)}.")
    return POLICIES[name]()


@dataclass(frozen=True, slots=True)
class Pace:
    """Limits one step's prompt tokens, so that prompts that can wait are computed together with decodes, not before
    them.

    The matrix products of a step of few tokens take as long as reading the weights, so up to a certain number further
    tokens cost little. Where the answers' lengths are known (`max_tokens`), prompts of shorter answers are spread over
    the steps that the longest answer needs anyway; starting the longest job first ends soonest (Graham 1969, "Bounds on
    Multiprocessing Timing Anomalies"). Prompt chunks in steps with decodes: Sarathi-Serve, arXiv:2403.02310.

    Attributes:
        tokens: any prompt may join a step up to this many tokens, decodes included.
        steps: the most steps that the longest answer still takes. Beyond `tokens`, only prompts of answers at least
            this long may join.
    """

    tokens: int
    steps: int

    @classmethod
    def of(cls, tokens: int, alive: Iterable[Request]) -> Pace:
        """Return the pace of the next step, given the running requests and the first waiting one."""
        return cls(tokens, max((_steps_of(request) for request in alive), default=0))

    def allowed(self, request: Request, taken: int, budget: int) -> int:
        """Return how many prompt tokens may join `taken` others when the step has `budget` left."""
        return budget if _steps_of(request) >= self.steps else max(0, min(budget, self.tokens - taken))


def _steps_of(request: Request) -> int:
    """Return the most tokens that its answer still lacks."""
    return request.max_tokens - request.num_output - request.pending


def victim_of(
    needy: Request, running: Sequence[Request], planned: Collection[Request], policy: Policy
) -> Request | None:
    """Return an idle request that ranks after `needy`, with blocks on the same rank, or None. So the first in line
    always progresses."""
    rank, place = policy.rank(needy), needy.table.rank
    idle = [r for r in running if not r.inflight and r.finish is None and r not in planned and policy.rank(r) > rank]
    return max((r for r in idle if r.table.rank == place), key=policy.victim_rank, default=None)


def displaced_by(
    first: Request, running: Sequence[Request], shortage: int, policy: Policy, cache: KVCache
) -> list[Request]:
    """Return the requests to preempt so that `first` gets a slot and `shortage` blocks; [] if all are not enough."""
    possible = [r for r in running if r.finish is None and policy.displaces(first, r)]
    if shortage > 0:
        possible = [r for r in possible if r.table.rank == first.table.rank]
    if sum(sum(1 for _ in r.table.held) for r in possible) < shortage:
        return []
    victims: list[Request] = []
    for victim in sorted(possible, key=policy.victim_rank, reverse=True):
        victims.append(victim)
        if cache.num_freed_by([v.table for v in victims]) >= shortage:
            return victims
    return []
