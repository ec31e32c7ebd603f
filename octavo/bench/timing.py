"""`Timing`: the times of one benchmarked request, measured or simulated."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field


@dataclass(slots=True)
class Timing:
    """The times of a request in seconds. `arrivals` are relative to sending, one per chunk with text."""

    prompt_tokens: int
    output_tokens: int = 0
    started: float = 0.0
    arrivals: list[float] = field(default_factory=list)
    latency: float = 0.0
    error: str | None = None

    @property
    def ok(self) -> bool:
        return self.error is None

    @property
    def ttft(self) -> float:
        """Time to first token, in seconds."""
        return self.arrivals[0]

    @property
    def gaps(self) -> list[float]:
        """Inter-token latencies, in seconds."""
        return [b - a for a, b in itertools.pairwise(self.arrivals)]

    @property
    def tpot(self) -> float:
        """Mean time per output token after the first, in seconds; 0 for a single token."""
        return (self.latency - self.ttft) / (self.output_tokens - 1) if self.output_tokens > 1 else 0.0
