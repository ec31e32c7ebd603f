"""Beam search: the most likely continuations, searched several at a time.

`BeamSearch` is the arithmetic, as Transformers has it with `early_stopping=False`; `BeamGroup` ties it to requests. A
beam is a request of its own, and when beams part or end, their KV blocks are shared and copied on write. All beams
report their step before any of them takes the next.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from octavo.cache.cache import BlockTable, KVCache
from octavo.core.output import TokenLogprobs
from octavo.core.params import SamplingParams
from octavo.core.request import Request


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A finished continuation. `score` is its log-probability / length ** length_penalty."""

    score: float
    logprob: float
    tokens: list[int]
    stopped: bool
    """Ended by a stop token, not by the limit."""


class BeamSearch:
    """One search.

    Attributes:
        keep: candidates that each beam must report: enough for `width` that do not end here.
        finished: at most `width`, the best first.
    """

    def __init__(self, width: int, length_penalty: float, stop_ids: frozenset[int], max_tokens: int) -> None:
        self.keep = max(2, 1 + len(stop_ids)) * width
        self.finished: list[Hypothesis] = []
        self._width = width
        self._penalty = length_penalty
        self._stop_ids = stop_ids
        self._max_tokens = max_tokens
        self._scores = [0.0]  # at first all beams are the prompt, and one of them speaks for all

    def step(self, outputs: Sequence[list[int]], found: Sequence[TokenLogprobs]) -> list[tuple[int, int]] | None:
        """The next beams as (beam it grows from, token), the best first; None when the search is over.

        Args:
            outputs: each beam's tokens so far.
            found: the most likely next tokens of each.
        """
        candidates = heapq.nlargest(
            self.keep,
            (
                (score + logprob, -beam, -token)
                for beam, (score, report) in enumerate(zip(self._scores, found, strict=False))
                for token, logprob in zip(report.top_ids, report.top_logprobs, strict=True)
            ),
        )
        length = len(outputs[0]) + 1
        moves: list[tuple[int, int]] = []
        scores: list[float] = []
        for place, (score, beam, token) in enumerate(candidates):
            stops = -token in self._stop_ids
            if not stops and length < self._max_tokens:
                if len(moves) < self._width:
                    moves.append((-beam, -token))
                    scores.append(score)
            elif place < self._width:
                tokens = [*outputs[-beam], -token]
                self.finished.append(Hypothesis(score / length**self._penalty, score, tokens, stops))
        self.finished = heapq.nlargest(self._width, self.finished, key=lambda one: one.score)
        self._scores = scores
        full = len(self.finished) == self._width
        if not moves or (full and scores[0] / length**self._penalty <= self.finished[-1].score):
            return None
        return moves


@dataclass(slots=True)
class BeamGroup:
    """The beams of one request, and what they reported in this round."""

    search: BeamSearch
    beams: list[Request]
    params: SamplingParams
    """How the worker samples: it reports the most likely tokens."""
    reports: dict[int, TokenLogprobs] = field(default_factory=dict)

    @classmethod
    def of(cls, beams: list[Request]) -> BeamGroup:
        first = beams[0]
        search = BeamSearch(len(beams), first.params.length_penalty, first.stop_ids, first.max_tokens)
        return cls(search, beams, SamplingParams(temperature=0, logprobs=search.keep, max_tokens=first.max_tokens))

    def waits(self, beam: Request) -> bool:
        """Whether the beam has done its part of this round, or is about to."""
        return beam.inflight > 0 or beam.index in self.reports

    def report(self, beam: Request, found: TokenLogprobs) -> bool:
        """Whether the round is complete."""
        self.reports[beam.index] = found
        return len(self.reports) == len(self.beams)

    def advance(self, cache: KVCache) -> bool:
        """Begin the next round: each beam takes over the tokens and shares the blocks of the one it grows from.

        Returns False when the search is over. A beam that lost its blocks to a preemption has nothing to share; who
        grows from it computes its tokens again.
        """
        beams = self.beams
        outputs = [beam.tokens[beam.num_prompt :] for beam in beams]
        moves = self.search.step(outputs, [self.reports[index] for index in range(len(beams))])
        self.reports = {}
        if moves is None:
            return False
        while len(moves) < len(beams):  # a tiny vocabulary has fewer continuations than there are beams
            moves.append(moves[-1])
        old = [(beam.tokens, beam.table, beam.num_computed) for beam in beams]
        for beam, (parent, token) in zip(beams, moves, strict=True):
            tokens, table, computed = old[parent]
            beam.tokens = [*tokens, token]
            beam.table, beam.num_computed = BlockTable(), 0
            if beam.slot >= 0 and table.blocks:
                cache.fork(table, beam.table, computed)
                beam.num_computed = computed
        for _, table, _ in old:
            cache.release(table)
        return True


class Beams:
    """All groups of a scheduler, by request id. A request that is in none of them is nobody's beam."""

    def __init__(self) -> None:
        self._groups: dict[str, BeamGroup] = {}
        self._moved: set[Request] = set()

    def open(self, choices: list[Request]) -> None:
        """A request has come; if it asks for a search, its choices are the beams."""
        if choices[0].params.beam_width:
            self._groups[choices[0].id] = BeamGroup.of(choices)

    def close(self, beam: Request) -> None:
        """The last beam of the request has ended and is forgotten."""
        group = self._groups.pop(beam.id, None)
        self._moved.difference_update(group.beams if group else ())

    def params(self, request: Request) -> SamplingParams:
        """How the worker samples it."""
        group = self._groups.get(request.id)
        return request.params if group is None else group.params

    def hold(self, request: Request) -> bool:
        """Whether it gets no row now, since its group is not ready for its next step."""
        group = self._groups.get(request.id)
        return group is not None and group.waits(request)

    def leader_of(self, request: Request) -> Request | None:
        """Whose prompt it shares; None where that did its part and lost its blocks: then the prefix tree has them."""
        leader = request.leader
        return None if leader is not None and leader.slot < 0 and self.hold(leader) else leader

    def moved(self, beam: Request) -> bool:
        """Whether its slot no longer holds its tokens and blocks, and is to be filled anew; said once."""
        known = beam in self._moved
        self._moved.discard(beam)
        return known

    def together(self, request: Request) -> list[Request]:
        """Those that end when it ends before its time."""
        group = self._groups.get(request.id)
        return [request] if group is None else [beam for beam in group.beams if beam.finish is None]

    def report(self, beam: Request, found: TokenLogprobs, cache: KVCache) -> list[tuple[Request, Hypothesis]]:
        """A beam's part of a round; with the last one all move on. At the end of the search, what each has to say."""
        group = self._groups[beam.id]
        if not group.report(beam, found):
            return []
        if group.advance(cache):
            self._moved.update(one for one in group.beams if one.slot >= 0)
            return []
        best = group.search.finished
        return [(one, best[min(one.index, len(best) - 1)]) for one in group.beams]

    def yielding(self, running: Sequence[Request], ranks_after: Callable[[Request], bool]) -> Request | None:
        """The beam that gives up its slot and blocks when nothing can run: the last that ranks after who needs them,
        else one that has done its part of the round and is not needed before the next.

        Args:
            running: in the order of rank.
        """
        idle = [request for request in running if request.id in self._groups and not request.inflight]
        candidates = [request for request in idle if ranks_after(request)] or [r for r in idle if self.hold(r)]
        return candidates[-1] if candidates else None
