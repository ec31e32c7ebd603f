"""Who yields: which running requests lose their slots and blocks to another."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from octavo.cache.cache import KVCache
from octavo.core.request import Request
from octavo.schedule.policy import Policy


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
