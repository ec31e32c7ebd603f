"""Metric families of several processes: serialization and summation."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec
from prometheus_client.metrics_core import Metric

Families = list[Metric]

# Equal in all processes, or reported for the oldest; everything else is summed.
_LEAST = ("process_start_time_seconds", "process_max_fds")
_COUNTING = frozenset({"counter", "histogram"})


class _MetricSample(msgspec.Struct, array_like=True):
    name: str
    labels: dict[str, str]
    value: float


class _Family(msgspec.Struct, array_like=True):
    name: str
    text: str
    kind: str
    samples: list[_MetricSample]


def encode(families: Iterable[Metric]) -> bytes:
    """Serialize for `decode` in another process."""
    return msgspec.msgpack.encode(
        [
            _Family(
                one.name, one.documentation, one.type, [_MetricSample(s.name, s.labels, s.value) for s in one.samples]
            )
            for one in families
        ]
    )


def decode(data: bytes) -> Families:
    return [_made(one) for one in msgspec.msgpack.decode(data, type=list[_Family])]


def total(groups: Sequence[Iterable[Metric]]) -> Families:
    """Return each family once, with samples of equal labels summed, in order of first occurrence."""
    families: dict[str, Metric] = {}
    sums: dict[str, dict[tuple[str, tuple[tuple[str, str], ...]], float]] = {}
    for family in (family for group in groups for family in group):
        families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
        known = sums.setdefault(family.name, {})
        for sample in family.samples:
            key = sample.name, tuple(sample.labels.items())
            if key not in known:
                known[key] = sample.value
            elif sample.name.endswith(_LEAST):
                known[key] = min(known[key], sample.value)
            else:
                known[key] += sample.value
    for name, known in sums.items():
        for (sample_name, labels), value in known.items():
            families[name].add_sample(sample_name, dict(labels), value)
    return list(families.values())


def lasting(families: Iterable[Metric]) -> Families:
    """Return the families that outlast their process: its counters, so that the sum never decreases."""
    return [family for family in families if family.type in _COUNTING]


def _made(one: _Family) -> Metric:
    family = Metric(one.name, one.text, one.kind)
    for sample in one.samples:
        family.add_sample(sample.name, sample.labels, sample.value)
    return family
