"""`DraftCounters`: the feature's metrics, with vLLM's names."""

from __future__ import annotations

from octavo.core.stats import FeatureMetric

_DECAY = 0.98


class DraftCounters:
    """Counts drafts, and estimates what they gain.

    Attributes:
        gain_ms: milliseconds saved per token, over recent steps that only decoded: what a token takes without drafts,
            minus what it took.
    """

    def __init__(self, most: int) -> None:
        self._rows = self._drafts = 0
        self._accepted = [0] * most
        self._seconds = self._plain = self._tokens = 0.0
        self._appended = 0

    def verified(self, num_drafts: int, num_accepted: int) -> None:
        self._rows += 1
        self._drafts += num_drafts
        self._appended += num_accepted
        for place in range(num_accepted):
            self._accepted[place] += 1

    def step(self, seconds: float, rows: int, plain: float) -> None:
        """Note a step of `rows` rows that took `seconds`, and would take `plain` without drafts."""
        tokens, self._appended = rows + self._appended, 0
        if plain:
            self._seconds = self._seconds * _DECAY + seconds
            self._plain = self._plain * _DECAY + plain * tokens / rows
            self._tokens = self._tokens * _DECAY + tokens

    @property
    def gain_ms(self) -> float:
        return (self._plain - self._seconds) / self._tokens * 1000 if self._tokens else 0.0

    def metrics(self) -> list[FeatureMetric]:
        accepted = float(sum(self._accepted))
        positions = {str(place): float(count) for place, count in enumerate(self._accepted)}
        return [
            _counter("spec_decode_num_drafts", "Rows with drafts that were verified.", self._rows),
            _counter("spec_decode_num_draft_tokens", "Draft tokens that were verified.", self._drafts),
            _counter("spec_decode_num_accepted_tokens", "Draft tokens that were accepted.", accepted),
            FeatureMetric(
                "spec_decode_num_accepted_tokens_per_pos",
                "counter",
                "Draft tokens that were accepted, by their position after the last token, from 0.",
                "position",
                positions,
            ),
            FeatureMetric(
                "spec_decode_gain_ms_per_token",
                "gauge",
                "Milliseconds that drafts save per token, over recent steps that only decoded.",
                "",
                {"": self.gain_ms},
            ),
        ]


def _counter(name: str, text: str, value: float) -> FeatureMetric:
    return FeatureMetric(name, "counter", text, "", {"": float(value)})
