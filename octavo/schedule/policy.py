"""Scheduling policies: who goes first, and who yields when slots or KV blocks run out.

A policy is an object with two orders over requests and one relation; the scheduler does the rest. Add one here and to
`POLICIES`: the flag then offers it, and the property tests run with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from octavo.core.errors import ConfigError
from octavo.core.request import BACKGROUND, Request

Rank = tuple[int, ...]


class Policy(Protocol):
    """Two total orders. `rank` must stay fixed while a request lives and end in the arrival number; `victim_rank` may
    follow what the request has computed.

    `spreads_prompts`: whether prompts may wait for the steps that longer answers need anyway; see `pace.py`.
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
