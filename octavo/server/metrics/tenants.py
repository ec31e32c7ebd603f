"""What each tenant asked for and got."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

MOST_NAMES = 100
"""Names that get values of their own: clients may be able to invent some. Later ones are counted together."""
OTHERS = "others"


@dataclass(slots=True)
class TenantTotals:
    """Sums over a tenant's requests that have ended. `queued_s` is their time from arrival to first step."""

    requests: int = 0
    prompt: int = 0
    cached: int = 0
    generated: int = 0
    queued_s: float = 0.0


class TenantMetrics:
    """Sums by tenant.

    Attributes:
        totals: label of a tenant -> its sums.
    """

    def __init__(self) -> None:
        self.totals: dict[str, TenantTotals] = {}

    def label(self, tenant: str) -> str:
        """Return the value of the label `tenant`."""
        return tenant if tenant in self.totals or len(self.totals) < MOST_NAMES else OTHERS

    def begin(self, tenant: str) -> None:
        """Take in a tenant's name, so that its first request is counted while it waits."""
        self.totals.setdefault(self.label(tenant), TenantTotals())

    def end(self, tenant: str, *, prompt: int, cached: int, generated: int, queued_s: float) -> None:
        """Count a request that has ended, in tokens and seconds."""
        totals = self.totals[self.label(tenant)]
        totals.requests += 1
        totals.prompt += prompt
        totals.cached += cached
        totals.generated += generated
        totals.queued_s += queued_s

    def families(self, prefix: str, labels: Mapping[str, str], live: Iterable[tuple[str, bool]]) -> Iterator[Metric]:
        """Yield the families, if any request has named a tenant.

        Args:
            live: of each request that has not ended, its tenant and whether it has got output.
        """
        if not self.totals.keys() - {""}:
            return
        counts = {label: [0, 0] for label in self.totals}
        for tenant, begun in live:
            counts[self.label(tenant)][begun] += 1
        for number, (name, text) in enumerate(_GAUGES):
            gauge = GaugeMetricFamily(prefix + name, text, labels=[*labels, "tenant"])
            for label, pair in counts.items():
                gauge.add_metric([*labels.values(), label], pair[number])
            yield gauge
        for name, text, field in _COUNTERS:
            counter = CounterMetricFamily(prefix + name, text, labels=[*labels, "tenant"])
            for label, totals in self.totals.items():
                counter.add_metric([*labels.values(), label], getattr(totals, field))
            yield counter


_GAUGES: Sequence[tuple[str, str]] = (
    ("tenant_requests_waiting", "A tenant's requests without output: queued, or their prompts are computed."),
    ("tenant_requests_running", "A tenant's requests that generate."),
)
_COUNTERS: Sequence[tuple[str, str, str]] = (
    ("tenant_requests", "A tenant's requests that have ended.", "requests"),
    ("tenant_prompt_tokens", "Prompt tokens of a tenant's requests that have ended.", "prompt"),
    ("tenant_prompt_tokens_cached", "Those that were found in the prefix cache.", "cached"),
    ("tenant_generation_tokens", "Tokens generated for a tenant's requests that have ended.", "generated"),
    (
        "tenant_queue_seconds",
        "Time from arrival to first step, summed over a tenant's requests that have ended; divide its rate by that of "
        "tenant_requests.",
        "queued_s",
    ),
)
