"""Scheduling policies: who goes first, and who yields when KV blocks run out.

A policy is an object with two orders over requests; the scheduler does the rest. Add one here and to `POLICIES`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from octavo.core.errors import ConfigError
from octavo.core.request import Request

Rank = tuple[int, ...]


class Policy(Protocol):
    """Two total orders; both must stay fixed while a request lives, and `rank` must end in the arrival number."""

    def rank(self, request: Request) -> Rank:
        """Lower runs earlier, is admitted earlier, and is never preempted for a higher one."""
        ...

    def victim_rank(self, request: Request) -> Rank:
        """Among those that may be preempted, the highest goes first."""
        ...


class Fcfs:
    """First come, first served; the victim is the one with the least to compute again."""

    def rank(self, request: Request) -> Rank:
        return (request.order,)

    def victim_rank(self, request: Request) -> Rank:
        return (-request.num_computed, request.order)


class Priority:
    """Lower `priority` first, then first come; the least urgent class yields first, its cheapest member leading."""

    def rank(self, request: Request) -> Rank:
        return (request.spec.priority, request.order)

    def victim_rank(self, request: Request) -> Rank:
        return (request.spec.priority, -request.num_computed, request.order)


POLICIES: Mapping[str, type[Policy]] = {"fcfs": Fcfs, "priority": Priority}


def make_policy(name: str) -> Policy:
    """Raises ConfigError for a name that is not in `POLICIES`."""
    if name not in POLICIES:
        raise ConfigError(f"--scheduling-policy {name!r} is not known; choose one of: {', '.join(POLICIES)}.")
    return POLICIES[name]()
