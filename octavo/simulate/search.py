"""Search the settings of the scheduler over simulations of one trace."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from octavo.bench.report import Summary
from octavo.bench.traces import Arrival
from octavo.core.errors import ConfigError
from octavo.simulate.goals import Goal, missed
from octavo.simulate.run import SimulatedEngine, Simulation

Settings = Mapping[str, object]
"""Field of `SchedulerConfig` -> value."""
Run = Callable[[SimulatedEngine, Sequence[Arrival]], Simulation]
_CLOSER = 1.03
"""Ratio of two rates up to which they are the same to the search for the highest."""
_MOST_SPEED, _LEAST_SPEED = 64.0, 1 / 64


@dataclass(frozen=True, slots=True)
class Trial:
    """A simulation with these settings.

    Attributes:
        missed: by how much it exceeds the goals; 0 if it keeps all.
        values: milliseconds of the goals' figures, in their order.
        latency: mean seconds of a request.
        throughput: output tokens a second.
    """

    settings: Settings
    missed: float
    values: tuple[float, ...]
    latency: float
    throughput: float
    preemptions: int

    @property
    def rank(self) -> tuple[float, float]:
        """Better trials are less. Goals come first; among settings that keep all, the latency decides."""
        return round(self.missed, 4), self.latency

    def dominates(self, other: Trial) -> bool:
        """Whether it is as good in all figures, and better in one."""
        mine, theirs = self._figures, other._figures
        return mine != theirs and all(one <= two for one, two in zip(mine, theirs, strict=True))

    @property
    def _figures(self) -> tuple[float, ...]:
        return (*self.values, self.latency, -self.throughput)


class Search:
    """Tries settings, each once.

    Args:
        make: returns the engine of some settings; raises ConfigError if they do not fit together.
        run: simulates an engine.
    """

    def __init__(
        self,
        make: Callable[[Settings], SimulatedEngine],
        run: Run,
        arrivals: Sequence[Arrival],
        goals: Sequence[Goal],
        tried: Callable[[Trial], None] = lambda trial: None,
    ) -> None:
        self._make = make
        self._run = run
        self._arrivals = arrivals
        self._goals = goals
        self._tried = tried
        self.trials: dict[tuple[tuple[str, object], ...], Trial | None] = {}

    def trial(self, settings: Settings) -> Trial | None:
        """Return the trial of some settings; None if they do not fit together."""
        key = tuple(sorted(settings.items()))
        if key not in self.trials:
            self.trials[key] = self._try(settings, self._arrivals)
            if (found := self.trials[key]) is not None:
                self._tried(found)
        return self.trials[key]

    def _try(self, settings: Settings, arrivals: Sequence[Arrival]) -> Trial | None:
        try:
            engine = self._make(settings)
        except ConfigError:
            return None
        found = self._run(engine, arrivals)
        summary = Summary.of(found.timings, found.duration)
        latencies = [timing.latency for timing in found.timings if timing.ok]
        return Trial(
            settings,
            missed(self._goals, summary),
            tuple(goal.value(summary) for goal in self._goals),
            sum(latencies) / len(latencies) if latencies else 0.0,
            summary.output_tokens / summary.duration if summary.duration else 0.0,
            found.stats.num_preemptions,
        )

    def best(self, start: Settings, changes: Callable[[Settings], Iterable[Settings]]) -> Trial:
        """Return the best trial of a search that changes the best settings so far in one way after the other, until
        none improves.

        Args:
            changes: returns what to change in some settings, each time in another way.

        Raises:
            ConfigError: the settings to start with do not fit together.
        """
        best = self.trial(start)
        if best is None:
            self._make(start)
            raise AssertionError("`_make` refuses these settings")
        before = None
        while best is not before:
            before = best
            for change in changes(before.settings):
                found = self.trial({**best.settings, **change})
                if found is not None and found.rank < best.rank:
                    best = found
        return best

    def front(self) -> list[Trial]:
        """Return the trials that no other is better than in every figure, by the first goal."""
        trials = [trial for trial in self.trials.values() if trial is not None]
        best: dict[tuple[float, ...], Trial] = {}
        for trial in trials:
            if not any(other.dominates(trial) for other in trials):
                best.setdefault(trial._figures, trial)
        return sorted(best.values(), key=lambda trial: (trial.values, trial.latency))

    def capacity(self, settings: Settings) -> float:
        """Return how many times as fast the requests may arrive for the goals still to be kept, by bisection; 0 if they
        are not kept at a small fraction of the rate."""
        low, high = 0.0, 0.0
        speed = 1.0
        while not (low and high):
            if self._keeps(settings, speed):
                low, speed = speed, speed * 2
            else:
                high, speed = speed, speed / 2
            if speed > _MOST_SPEED or speed < _LEAST_SPEED:
                return low
        while high / low > _CLOSER:
            middle = (low * high) ** 0.5
            low, high = (middle, high) if self._keeps(settings, middle) else (low, middle)
        return low

    def _keeps(self, settings: Settings, speed: float) -> bool:
        faster = [replace(arrival, at=arrival.at / speed) for arrival in self._arrivals]
        trial = self._try(settings, faster)
        return trial is not None and not trial.missed
