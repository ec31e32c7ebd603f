"""Scheduling policies: who goes first, and who yields when slots or KV blocks run out.

A policy is an object with two orders over requests and one relation; the scheduler does the rest. Add one here and to
`POLICIES`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from octavo.core.errors import ConfigError
from octavo.core.request import BACKGROUND, Request

Rank = tuple[int, ...]


class Policy(Protocol):
    """Two total orders. `rank` must stay fixed while a request lives and end in the arrival number; `victim_rank` may
    follow what the request has computed."""

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

    def rank(self, request: Request) -> Rank:
        return (request.spec.priority, request.order)

    def victim_rank(self, request: Request) -> Rank:
        return (request.spec.priority, -request.num_computed, request.order)

    def displaces(self, waiting: Request, running: Request) -> bool:
        return waiting.spec.priority < running.spec.priority


def _in_background(request: Request) -> bool:
    return request.spec.priority >= BACKGROUND


POLICIES: Mapping[str, type[Policy]] = {"fcfs": Fcfs, "priority": Priority}


def make_policy(name: str) -> Policy:
    """Raises ConfigError for a name that is not in `POLICIES`."""
    if name not in POLICIES:
        raise ConfigError(f"--scheduling-policy {name!r} is not known; choose one of: {', '.join(POLICIES)}.")
    return POLICIES[name]()
