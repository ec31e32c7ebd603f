"""`BeamSearch`: the algorithm of Transformers with `early_stopping=False`."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from octavo.core.output import TokenLogprobs


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
        keep: candidates that each beam must report, so that `width` remain if others end.
        finished: at most `width`, best first.
    """

    def __init__(self, width: int, length_penalty: float, stop_ids: frozenset[int], max_tokens: int) -> None:
        self.keep = max(2, 1 + len(stop_ids)) * width
        self.finished: list[Hypothesis] = []
        self._width = width
        self._penalty = length_penalty
        self._stop_ids = stop_ids
        self._max_tokens = max_tokens
        self._scores = [0.0]  # at first all beams equal the prompt, so one is enough

    def step(self, outputs: Sequence[list[int]], found: Sequence[TokenLogprobs]) -> list[tuple[int, int]] | None:
        """Return the next beams as (parent beam, token), best first; None when the search is over.

        Args:
            outputs: each beam's tokens so far.
            found: each beam's most likely next tokens.
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
