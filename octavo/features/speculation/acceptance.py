"""`Acceptance`: how likely drafts are accepted; `Again`: what rejected ones of recurrent models cost besides."""

from __future__ import annotations

_DECAY = 0.95
_WEIGHT = 4.0
"""Weight of the experience with all requests in a new request's share, in drafts."""
_PRIOR = 0.6


class Acceptance:
    """The chance that a draft is accepted if all before it were, from recent drafts."""

    __slots__ = ("_accepted", "_tried")

    def __init__(self, others: Acceptance | None = None) -> None:
        """
        Args:
            others: what is known of other requests.
        """
        share = _PRIOR if others is None else max(0.3, others.share)  # else no request would try again
        self._tried = _WEIGHT
        self._accepted = share * _WEIGHT

    @property
    def share(self) -> float:
        return self._accepted / self._tried

    def fade(self) -> None:
        """Reduce the weight of earlier drafts to that of the first prior, so that new ones decide."""
        share = self.share
        self._tried = min(self._tried, _WEIGHT)
        self._accepted = share * self._tried

    def add(self, num_drafts: int, num_accepted: int) -> None:
        """Note a row's drafts. Those after the first rejected one are not counted."""
        self._tried = self._tried * _DECAY + min(num_accepted + 1, num_drafts)
        self._accepted = self._accepted * _DECAY + num_accepted


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
