"""`simulate`: what the requests of a trace would have experienced from an engine with given settings."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from octavo.bench.timing import Timing
from octavo.bench.traces import Arrival
from octavo.cache.cache import KVCache
from octavo.core.cache_groups import FULL, CacheGroup
from octavo.core.errors import InvalidRequestError
from octavo.core.output import TokenDelta
from octavo.core.params import SamplingParams
from octavo.core.request import GenerateRequest
from octavo.core.stats import EngineStats
from octavo.engine.loop import EngineLoop
from octavo.schedule.limits import Limits
from octavo.schedule.policy import make_policy
from octavo.schedule.scheduler import Scheduler
from octavo.simulate.answers import END, Answer, TokenMaker
from octavo.simulate.device import Clock, SimulatedDevice, StepSeconds
from octavo.simulate.shape import ShapeReader


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedEngine:
    """The settings of a simulated engine.

    Attributes:
        depth: steps launched ahead of the oldest one whose tokens are not known.
    """

    limits: Limits
    num_blocks: int
    block_size: int
    policy: str = "fcfs"
    depth: int = 0
    groups: tuple[CacheGroup, ...] = FULL


@dataclass(slots=True)
class Simulation:
    """What a simulation found.

    Attributes:
        timings: of the requests, by arrival, as their clients would have measured them.
        duration: seconds from the first arrival to the end of the last request.
        stats: the engine's counters at the end.
        kv_mean, kv_most: fraction of the KV cache's blocks that running requests held, over the time and at most.
        busy: fraction of the time in which the device computed.
        wall_s: seconds that the simulation took.
    """

    timings: list[Timing]
    duration: float = 0.0
    stats: EngineStats = field(default_factory=EngineStats)
    kv_mean: float = 0.0
    kv_most: float = 0.0
    busy: float = 0.0
    wall_s: float = 0.0

    @property
    def hit_rate(self) -> float:
        """Fraction of the prompts' tokens that were found in the KV cache."""
        return self.stats.prompt_tokens_cached / self.stats.prompt_tokens if self.stats.prompt_tokens else 0.0


def simulate(
    engine: SimulatedEngine,
    arrivals: Sequence[Arrival],
    seconds: StepSeconds,
    *,
    front_end_s: float = 0.0,
    max_concurrency: int | None = None,
) -> Simulation:
    """Run the engine's scheduler, cache and loop on a virtual clock. The same arguments give the same result.

    Args:
        arrivals: in order of their times.
        seconds: returns how long a step takes.
        front_end_s: seconds between client and engine: half of them until the engine has a request, and half until
            the client has a token.
        max_concurrency: requests that are sent at the same time at most; the others wait for these to end, and their
            times begin when they are sent.
    """
    began = time.perf_counter()
    run = _Run(engine, arrivals, seconds, front_end_s, max_concurrency or len(arrivals))
    found = run.all()
    found.wall_s = time.perf_counter() - began
    return found


class _Run:
    def __init__(
        self,
        engine: SimulatedEngine,
        arrivals: Sequence[Arrival],
        seconds: StepSeconds,
        front_end_s: float,
        max_concurrency: int,
    ) -> None:
        limits = engine.limits
        in_flight = limits.max_ahead * limits.max_num_batched_tokens
        self._cache = KVCache(engine.num_blocks, engine.block_size, engine.groups, in_flight)
        self._scheduler = Scheduler(self._cache, limits, make_policy(engine.policy), eos_token_ids=[END])
        self._clock = Clock()
        self._answers: dict[str, Answer] = {}
        shapes = ShapeReader(engine.groups)
        self._device = SimulatedDevice(self._clock, seconds, shapes, self._answers, self._scheduler.names_of)
        self._loop = EngineLoop(self._scheduler, self._device, engine.depth)
        self._tokens = TokenMaker()
        self._half = front_end_s / 2
        self._left = deque(enumerate(arrivals))
        self._timings = [Timing(arrival.prompt_tokens) for arrival in arrivals]
        self._choices: dict[str, int] = {}
        self._places = deque([0.0] * max_concurrency)
        """When clients are free to send a request."""
        self._kv_sum = 0.0
        self._found = Simulation(self._timings)

    def all(self) -> Simulation:
        clock, loop = self._clock, self._loop
        while self._left or loop.busy:
            self._send_due()
            if loop.busy:
                before = clock.now
                news = loop.step()
                self._watch(clock.now - before)
                for delta in news:
                    self._take(delta)
            elif self._left:
                clock.now = max(clock.now, self._next_at())
        return self._summary()

    def _next_at(self) -> float:
        """Return when the engine gets the next request; never, while no client is free."""
        if not self._left or not self._places:
            return math.inf
        return max(self._left[0][1].at, self._places[0]) + self._half

    def _send_due(self) -> None:
        while (at := self._next_at()) <= self._clock.now:
            number, arrival = self._left.popleft()
            self._places.popleft()
            self._timings[number].started = at - self._half
            self._send(number, arrival)

    def _send(self, number: int, arrival: Arrival) -> None:
        name = str(number)
        prompt, answer = self._tokens.make(arrival)
        most = arrival.max_tokens if arrival.stops else arrival.output_tokens
        try:
            params = SamplingParams(max_tokens=most, n=arrival.n)
            spec = GenerateRequest(id=name, tokens=prompt, params=params, priority=arrival.priority)
            self._loop.add(spec)
        except InvalidRequestError as error:
            self._timings[number].error = str(error)
            self._places.append(self._clock.now + self._half)
            return
        self._answers[name] = answer
        self._choices[name] = arrival.n

    def _take(self, delta: TokenDelta) -> None:
        timing, at = self._timings[int(delta.id)], self._clock.now + self._half
        if delta.tokens:
            timing.arrivals.append(at - timing.started)
            timing.output_tokens += len(delta.tokens)
        if delta.error is not None:
            timing.error = delta.error
        if delta.finish is None:
            return
        self._choices[delta.id] -= 1
        if not self._choices[delta.id]:
            del self._choices[delta.id], self._answers[delta.id]
            timing.latency = at - timing.started
            self._places.append(at)

    def _watch(self, seconds: float) -> None:
        used = self._cache.pool.num_used / max(1, self._cache.num_blocks)
        self._kv_sum += used * seconds
        self._found.kv_most = max(self._found.kv_most, used)

    def _summary(self) -> Simulation:
        found, end = self._found, self._clock.now + self._half
        found.duration = end
        found.stats = self._loop.stats()
        found.kv_mean = self._kv_sum / end if end else 0.0
        found.busy = self._device.busy_s / end if end else 0.0
        return found
