"""Timing launches on a device whose host is slow: the device is measured, not the launching."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from octavo.nn.ops import race


class Chip:
    """A host and a device, each with its clock in microseconds; launches queue."""

    def __init__(self, launching: float) -> None:
        self.launching, self.host, self.device = launching, 0.0, 0.0

    def run(self, microseconds: float) -> None:
        self.host += self.launching
        self.device = max(self.device, self.host) + microseconds

    def sleep(self, cycles: int) -> None:
        self.device = max(self.device, self.host) + cycles / 2000


def events_of(chip: Chip):
    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.at = max(chip.device, chip.host)

        def query(self) -> bool:
            return self.at <= chip.host

        def synchronize(self) -> None:
            chip.host = max(chip.host, self.at)

        def elapsed_time(self, end: Event) -> float:
            return (end.at - self.at) / 1e3

    return Event


@pytest.mark.parametrize("launching", [1.0, 40.0, 150.0])
def test_a_slow_host_is_not_measured(monkeypatch: pytest.MonkeyPatch, launching: float) -> None:
    chip = Chip(launching)
    monkeypatch.setattr(torch.cuda, "Event", events_of(chip))
    monkeypatch.setattr(torch.cuda, "_sleep", chip.sleep)
    runs = [lambda weight, took=took: chip.run(took) for took in (50.0, 47.0, 90.0)]
    weights = [torch.empty(16, 16)] * 4
    assert race.Track().race(runs, weights, 8, 3) == pytest.approx([0.2, 0.188, 0.36])


def test_a_host_too_slow_to_keep_up_with_is_measured_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    chip = Chip(10_000.0)
    monkeypatch.setattr(torch.cuda, "Event", events_of(chip))
    monkeypatch.setattr(torch.cuda, "_sleep", chip.sleep)
    (took,) = race.Track().race([lambda weight: chip.run(50.0)], [torch.empty(16, 16)], 8, 1)
    assert took > 30
