"""`Acceptance`: how likely drafts are accepted; `Again`: what rejected ones of recurrent models cost besides."""

from __future__ import annotations

_DECAY = 0.95
_WEIGHT = 4.0
"""Weight of the experience with all requests in a new request's share, in drafts."""
_PRIOR = 0.6
_LEAST = 0.3
"""Least share with which a request begins, else none would try again."""
_PLACE_WEIGHT = 1.0
"""Weight of the share of all places in that of each, in drafts."""


class Acceptance:
    """How likely drafts are accepted, from recent ones: the first after a token, the second if the first was, ..."""

    __slots__ = ("_accepted", "_places", "_tried")

    def __init__(self, others: Acceptance | None = None) -> None:
        """
        Args:
            others: what is known of other requests.
        """
        share = _PRIOR if others is None else max(_LEAST, others.share)
        self._tried = _WEIGHT
        self._accepted = share * _WEIGHT
        self._places: list[tuple[float, float]] = []
        """Drafts that were accepted, and all, of those at each place; all before them were accepted."""
        if others is not None:
            self._places = [_reduced(place) for place in others._places]
            if self._places:
                accepted, tried = self._places[0]
                self._places[0] = max(accepted, _LEAST * tried), tried

    @property
    def share(self) -> float:
        """The share of all drafts that were not behind a rejected one."""
        return self._accepted / self._tried

    def chances(self, count: int, hope: float = 1.0) -> list[float]:
        """Return how likely the first, the first two, ... and the first `count` drafts are all accepted.

        Args:
            hope: how many times as many of each place.
        """
        found, chance = [], 1.0
        for place in range(count):
            accepted, tried = self._places[place] if place < len(self._places) else (0.0, 0.0)
            share = (accepted + self.share * _PLACE_WEIGHT) / (tried + _PLACE_WEIGHT)
            chance *= min(1.0, hope * share)
            found.append(chance)
        return found

    def fade(self) -> None:
        """Reduce the weight of earlier drafts to that of the first prior, so that new ones decide."""
        self._accepted, self._tried = _reduced((self._accepted, self._tried))
        self._places = [_reduced(place) for place in self._places]

    def add(self, num_drafts: int, num_accepted: int) -> None:
        """Note a row's drafts. Those after the first rejected one are not counted."""
        tried = min(num_accepted + 1, num_drafts)
        self._tried = self._tried * _DECAY + tried
        self._accepted = self._accepted * _DECAY + num_accepted
        self._places += [(0.0, 0.0)] * (tried - len(self._places))
        for place in range(tried):
            before, all_before = self._places[place]
            self._places[place] = before * _DECAY + (place < num_accepted), all_before * _DECAY + 1


def _reduced(counts: tuple[float, float]) -> tuple[float, float]:
    """Return accepted and tried drafts of the same share, with at most the weight of a prior."""
    accepted, tried = counts
    return (accepted, tried) if tried <= _WEIGHT else (accepted * _WEIGHT / tried, _WEIGHT)


class Again:
    """Tokens that are computed again because drafts were rejected (`DraftBounds.rewinds`), for each recent draft."""

    __slots__ = ("_drafts", "_tokens")

    def __init__(self) -> None:
        self._drafts = self._tokens = 0.0

    @property
    def share(self) -> float:
        return self._tokens / self._drafts if self._drafts else 0.0

    def drafted(self, count: int) -> None:
        """Note the drafts of a row."""
        self._drafts = self._drafts * _DECAY + count
        self._tokens *= _DECAY

    def add(self, count: int) -> None:
        """Note tokens that a step computes again."""
        self._tokens += count
