"""`Siblings`: the sequences of one request. They share the KV blocks of their prompt.

With `n > 1` they are independent choices. Under a feature's `Lockstep` rule they proceed in rounds: all report a step
before any takes the next, they may continue each other's tokens, and they end together. KV blocks of forked sequences
are shared and copied on write.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence

from octavo.cache.cache import KVCache
from octavo.cache.table import BlockTable
from octavo.core.output import TokenLogprobs
from octavo.core.params import SamplingParams
from octavo.core.request import GenerateRequest
from octavo.schedule.hooks import Ending, Lockstep
from octavo.schedule.request import Request


class Siblings:
    """The sequences of one request, in the order of their index.

    Attributes:
        lockstep: the rule that keeps them in rounds; None for independent choices.
    """

    __slots__ = ("_members", "_moved", "_params", "_reports", "lockstep")

    def __init__(self, params: SamplingParams, lockstep: Lockstep | None = None) -> None:
        self.lockstep = lockstep
        self._params = params if lockstep is None else lockstep.params
        self._members: list[Request] = []
        self._reports: dict[int, TokenLogprobs] = {}
        self._moved: set[Request] = set()

    def __iter__(self) -> Iterator[Request]:
        return iter(self._members)

    @property
    def params(self) -> SamplingParams:
        """Sampling parameters of each sequence."""
        return self._params

    def join(self, request: Request) -> None:
        self._members.append(request)

    def part(self) -> None:
        """Let go of the sequences, which have all ended; otherwise only the garbage collector would free them."""
        self._members.clear()

    def holds(self, request: Request) -> bool:
        """Return whether a sequence must wait, because its step of the round is in flight or reported."""
        return self.lockstep is not None and (request.inflight > 0 or request.index in self._reports)

    def leader_of(self, request: Request) -> Request | None:
        """Return the sequence whose prompt blocks a new one shares; None if it need not wait for one.

        A leader that was preempted after its part of the round has left its blocks to the prefix tree.
        """
        leader = self._members[0]
        return None if leader is request or (leader.slot < 0 and self.holds(leader)) else leader

    def take_moved(self, request: Request) -> bool:
        """Return, once, whether the worker's slot no longer matches the sequence and must be filled again."""
        if request not in self._moved:
            return False
        self._moved.remove(request)
        return True

    def ending_with(self, request: Request) -> list[Request]:
        """Return the sequences that end when this one ends early; in lockstep the others would wait forever."""
        return [request] if self.lockstep is None else [one for one in self._members if one.finish is None]

    def report(self, request: Request, found: TokenLogprobs, cache: KVCache) -> list[tuple[Request, Ending]]:
        """Take a sequence's part of a round; the last part starts the next round.

        Returns:
            How each sequence ends, if this was the last round; else [].
        """
        assert self.lockstep is not None
        self._reports[request.index] = found
        if len(self._reports) < len(self._members):
            return []
        if self._advance(self.lockstep, cache):
            self._moved.update(one for one in self._members if one.slot >= 0)
            return []
        endings = self.lockstep.endings()
        return [(one, endings[min(one.index, len(endings) - 1)]) for one in self._members]

    def _advance(self, lockstep: Lockstep, cache: KVCache) -> bool:
        """Start the next round: each sequence takes over the tokens and shares the blocks of the one it continues.

        A preempted sequence has no blocks to share; the one that continues it recomputes its tokens.

        Returns:
            False if there is no next round.
        """
        members = self._members
        outputs = [one.tokens[one.num_prompt :] for one in members]
        moves = lockstep.step(outputs, [self._reports[index] for index in range(len(members))])
        self._reports = {}
        if moves is None:
            return False
        moves += moves[-1:] * (len(members) - len(moves))  # a tiny vocabulary has fewer continuations
        old = [(one.tokens, one.table, one.num_computed) for one in members]
        for one, (parent, token) in zip(members, moves, strict=True):
            tokens, table, computed = old[parent]
            one.tokens = [*tokens, token]
            one.table, one.num_computed = BlockTable(), 0
            if one.slot >= 0 and table.blocks and cache.fork(table, one.table, computed):
                one.num_computed = computed
        for _, table, _ in old:
            cache.release(table)
        return True


def make_siblings(
    spec: GenerateRequest,
    max_tokens: int,
    eos: frozenset[int],
    seeds: random.Random,
    order: int,
    lockstep: Lockstep | None = None,
) -> list[Request]:
    """Create the sequences of a new request. `order` is the arrival number of the first."""
    own_stops = frozenset(spec.params.stop_token_ids or ())
    stop_ids = own_stops if spec.params.ignore_eos else own_stops | eos
    if lockstep is not None:
        lockstep.begin(max_tokens, stop_ids)
    siblings = Siblings(spec.params, lockstep)
    for index in range(spec.params.n if lockstep is None else lockstep.width):
        siblings.join(
            Request(
                spec=spec,
                index=index,
                order=order + index,
                tokens=list(spec.tokens),
                max_tokens=max_tokens,
                stop_ids=stop_ids,
                seed=seeds.getrandbits(62) if spec.params.seed is None else spec.params.seed + index,
                table=BlockTable(),
                siblings=siblings,
            )
        )
    return list(siblings)


def yielding(running: Sequence[Request], ranks_after: Callable[[Request], bool]) -> Request | None:
    """Return the sequence in lockstep to preempt when nothing can run; None without one.

    That is the last one that ranks after the requests in need, else one that has reported its step of the round.

    Args:
        running: running requests, by rank.
        ranks_after: whether a request ranks after those in need.
    """
    idle = [one for one in running if one.siblings.lockstep is not None and not one.inflight]
    candidates = [one for one in idle if ranks_after(one)] or [one for one in idle if one.siblings.holds(one)]
    return candidates[-1] if candidates else None
