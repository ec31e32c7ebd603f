"""Scheduling policies: which request goes first, which yields when slots or KV blocks run out, which prompts can wait.

A policy is an object with two orders over requests and one relation; the scheduler does the rest. Add one here and to
`POLICIES`: the flag then offers it, and the property tests run with it.
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
    """Two total orders. `rank` must stay fixed while a request lives and end in the arrival number; `victim_rank` may
    follow what the request has computed.

    `spreads_prompts`: whether prompts may wait for the steps that longer answers need anyway; see `Pace`.
    """

    spreads_prompts: bool

    def rank(self, request: Request) -> Rank:
        """Lower runs earlier, is admitted earlier, and is never preempted for a higher one."""
        ...

    def victim_rank(self, request: Request) -> Rank:
        """Among those that may be preempted, the highest goes first."""
        ...

    def displaces(self, waiting: Request, running: Request) -> bool:
        """Whether a waiting request may take the place of a running one.

        Only of one that `rank` puts after it, and only ever in one direction, or the two would take turns.
        """
        ...


class Fcfs:
    """First come, first served; the victim is the one with the least to compute again. Background work comes last."""

    spreads_prompts = False

    def rank(self, request: Request) -> Rank:
        return (_in_background(request), request.order)

    def victim_rank(self, request: Request) -> Rank:
        return (_in_background(request), -request.num_computed, request.order)

    def displaces(self, waiting: Request, running: Request) -> bool:
        return _in_background(waiting) < _in_background(running)


class Priority:
    """Lower `priority` first, then first come; the least urgent class yields first, its cheapest member leading.

    One that arrives takes the place of running ones of less urgent classes, if it finds no other.
    """

    spreads_prompts = False

    def rank(self, request: Request) -> Rank:
        return (request.spec.priority, request.order)

    def victim_rank(self, request: Request) -> Rank:
        return (request.spec.priority, -request.num_computed, request.order)

    def displaces(self, waiting: Request, running: Request) -> bool:
        return waiting.spec.priority < running.spec.priority


class LongestFirst(Fcfs):
    """The longest answer first, as far as `max_tokens` tells, for work that is done when all of it is done.

    What begins last then ends first, and no long answer is left to decode alone. Background work comes last.
    """

    spreads_prompts = True

    def rank(self, request: Request) -> Rank:
        return (_in_background(request), -request.max_tokens, request.order)


def _in_background(request: Request) -> bool:
    return request.spec.priority >= BACKGROUND


POLICIES: Mapping[str, type[Policy]] = {"fcfs": Fcfs, "priority": Priority, "longest-first": LongestFirst}


def make_policy(name: str) -> Policy:
    """Raises ConfigError for a name that is not in `POLICIES`."""
    if name not in POLICIES:
        raise ConfigError(f"--scheduling-policy {name!r} is not known; choose one of: {', '.join(POLICIES)}.")
    return POLICIES[name]()


@dataclass(frozen=True, slots=True)
class Pace:
    """Limits one step's prompt tokens, so that prompts which can wait are computed beside decodes, not ahead of them.

    The products of a step of few tokens take as long as reading the weights does, so up to a certain number further
    tokens cost little. Where the answers' lengths are known (`max_tokens`), prompts of shorter answers are spread over
    the steps that the longest answer needs anyway; starting the longest job first ends soonest (Graham 1969, "Bounds on
    Multiprocessing Timing Anomalies"). Prompt chunks beside decodes: Sarathi-Serve, arXiv:2403.02310.

    Attributes:
        tokens: up to so many in the step, with what decodes, any prompt is welcome.
        steps: which the longest answer still takes at most. Beyond `tokens` only prompts of answers as long are.
    """

    tokens: int
    steps: int

    @classmethod
    def of(cls, tokens: int, alive: Iterable[Request]) -> Pace:
        """The pace of the next step, given who runs and who is next in line."""
        return cls(tokens, max((_steps_of(request) for request in alive), default=0))

    def allowed(self, request: Request, taken: int, budget: int) -> int:
        """The tokens of a prompt that may join `taken` others, where `budget` are left to the step."""
        return budget if _steps_of(request) >= self.steps else max(0, min(budget, self.tokens - taken))


def _steps_of(request: Request) -> int:
    """The tokens that its answer still lacks, if it becomes as long as it may."""
    return request.max_tokens - request.num_output - request.pending


def victim_of(
    needy: Request, running: Sequence[Request], planned: Collection[Request], policy: Policy
) -> Request | None:
    """An idle request ranked after `needy`, so that the first in line always gets on; None if there is none yet."""
    rank = policy.rank(needy)
    idle = [r for r in running if not r.inflight and r.finish is None and r not in planned and policy.rank(r) > rank]
    return max(idle, key=policy.victim_rank, default=None)


def displaced_by(
    first: Request, running: Sequence[Request], shortage: int, policy: Policy, cache: KVCache
) -> list[Request]:
    """Whose places a waiting request may take to get a slot and `shortage` blocks; [] if all of them would not do."""
    possible = [r for r in running if r.finish is None and policy.displaces(first, r)]
    if sum(sum(1 for _ in r.table.held) for r in possible) < shortage:
        return []
    victims: list[Request] = []
    for victim in sorted(possible, key=policy.victim_rank, reverse=True):
        victims.append(victim)
        if cache.num_freed_by([v.table for v in victims]) >= shortage:
            return victims
    return []
