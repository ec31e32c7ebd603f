"""Scheduling policies: the order of admission, the order of preemption, and which prompts can wait.

A policy is two orders over requests and one relation; the scheduler does the rest. Add a class here and to `POLICIES`:
the flag then offers it, and the property tests run with it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from octavo.cache.cache import KVCache
from octavo.core.errors import ConfigError
from octavo.core.request import BACKGROUND
from octavo.schedule.queue import FairQueue, Queue, Rank, RankedQueue
from octavo.schedule.request import Request
from octavo.schedule.shares import Accounts


class Policy(Protocol):
    """Two total orders. `rank` must end in the arrival number, and must not change from a request's first slot on,
    except in `displaced`; before that, only its queue may depend on it. `victim_rank` may depend on what the request
    has computed.

    Attributes:
        spreads_prompts: whether prompts may wait for the steps that longer answers need anyway; see `Pace`.
        displaces_last: whether a request that displaces any of the running ones displaces the last by rank.
    """

    spreads_prompts: bool
    displaces_last: bool

    def queue(self) -> Queue:
        """Return the queue of waiting requests. Called once."""
        ...

    def arrive(self, request: Request) -> None:
        """Set `request.turn`, if `rank` depends on when the request came. Called once, before the request waits."""
        ...

    def begin(self, request: Request) -> None:
        """Called when a request takes a slot; again after it was preempted."""
        ...

    def measure(self, running: Sequence[Request]) -> None:
        """Called before a step is planned while requests wait."""
        ...

    def displaced(self, request: Request) -> None:
        """Called before a request is preempted for one that `displaces` it. From now on it ranks after that one."""
        ...

    def end(self, request: Request) -> None:
        """Called when a request has ended; it may be called twice, and for one that did not arrive."""
        ...

    def rank(self, request: Request) -> Rank:
        """Return the rank: a lower one runs and is admitted earlier, and is never preempted for a higher one."""
        ...

    def victim_rank(self, request: Request) -> Rank:
        """Return the order of preemption: the highest of the possible victims is preempted first."""
        ...

    def displaces(self, waiting: Request, running: Request) -> bool:
        """Return whether a waiting request may preempt a running one.

        True only if `running` ranks after `waiting`, at the latest once it was `displaced`, and never in both
        directions, or the two would preempt each other in turns.
        """
        ...


class Fcfs:
    """First come, first served; the victim is the request with the least to recompute. Background work comes last."""

    spreads_prompts = False
    displaces_last = True

    def queue(self) -> Queue:
        return RankedQueue(self.rank)

    def arrive(self, request: Request) -> None:
        """Do nothing."""

    def begin(self, request: Request) -> None:
        """Do nothing."""

    def measure(self, running: Sequence[Request]) -> None:
        """Do nothing."""

    def displaced(self, request: Request) -> None:
        """Do nothing."""

    def end(self, request: Request) -> None:
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


class Fair(Fcfs):
    """The tenant that has had the least for its weight first; see `Accounts`. Background work comes last, with accounts
    of its own.

    A waiting request ranks by its tenant's account, which changes while others run; one that has begun, by the account
    as it was then.

    The queue divides what begins; running requests keep their slots, which long answers may hold for long. So a request
    may also displace one of a tenant that has had more and would still have as many slots for its weight as the other
    one then has; if that one has a slot, only if it is behind also with this request. Each request is displaced at most
    once, and the two tenants' slots become more equal each time.
    """

    displaces_last = False

    def __init__(self, weights: Mapping[str, float] | None = None) -> None:
        self._accounts = Accounts(weights or {})

    def queue(self) -> Queue:
        return FairQueue(self._accounts, self.rank)

    def arrive(self, request: Request) -> None:
        request.turn = _NOT_BEGUN
        self._accounts.arrive(request)

    def begin(self, request: Request) -> None:
        value = self._accounts.begin(request)
        if request.turn == _NOT_BEGUN:
            request.turn = value

    def measure(self, running: Sequence[Request]) -> None:
        self._accounts.measure(running)

    def displaced(self, request: Request) -> None:
        request.turn = _NOT_BEGUN
        self._accounts.of(request).slots -= 1

    def end(self, request: Request) -> None:
        self._accounts.end(request)

    def rank(self, request: Request) -> Rank:
        turn = self._accounts.of(request).value if request.turn == _NOT_BEGUN else request.turn
        return (_in_background(request), turn, request.order)

    def displaces(self, waiting: Request, running: Request) -> bool:
        if _in_background(waiting) != _in_background(running):
            return _in_background(running)
        if running.num_preemptions or waiting.turn != _NOT_BEGUN:
            return False
        mine, other = self._accounts.of(waiting), self._accounts.of(running)
        cost = mine.of_cost(mine.expected(waiting)) if mine.slots else 0
        behind = mine is not other and mine.value + cost < other.value
        return behind and other.slots * mine.weight > (mine.slots + 1) * other.weight


_LEAST_WEIGHT = 0.001
_NOT_BEGUN = -1
"""`Request.turn` under `Fair` before a request has a slot, and once it was displaced."""


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
    "fair": Fair,
}


def make_policy(name: str, weights: Mapping[str, Any] | None = None) -> Policy:
    """Return a new policy.

    Args:
        weights: tenant -> its weight, for the fair policy.

    Raises:
        ConfigError: the name is not in `POLICIES`, a weight is out of range, or weights have no effect.
    """
    if name not in POLICIES:
        raise ConfigError(f"--scheduling-policy {name!r} is not known; choose one of: {', '.join(POLICIES)}.")
    if POLICIES[name] is Fair:
        return Fair(_checked(weights or {}))
    if weights:
        raise ConfigError(
            f"--tenant-weights has no effect with --scheduling-policy {name}: choose fair, or leave it out."
        )
    return POLICIES[name]()


def _checked(weights: Mapping[str, Any]) -> Mapping[str, float]:
    for tenant, weight in weights.items():
        if type(weight) not in (int, float) or not _LEAST_WEIGHT <= weight <= 1 / _LEAST_WEIGHT:
            raise ConfigError(
                f"--tenant-weights: the weight of {tenant!r} must be a number from {_LEAST_WEIGHT} to "
                f"{1 / _LEAST_WEIGHT:,.0f}, got {weight!r}."
            )
    return weights


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
