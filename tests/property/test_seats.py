"""Any crowd of requests for any models: none starves, no busy model is evicted, no more are loaded than may be."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from itertools import count

from hypothesis import given
from hypothesis import strategies as st

from octavo.pool.seats import LINGER_LOADS, TURN_LOADS, Seats, Standing

TURN_S = 4.0
LONGEST_S, LOAD_S, EVICT_S = 6.0, 3.0, 1.0
SLACK_S = 0.01


@dataclass(order=True)
class Event:
    at: float
    number: int
    what: str = field(compare=False)
    name: str = field(compare=False)
    value: float = field(compare=False, default=0.0)


class World:
    """Plays arrivals, loads and evictions against a virtual clock, and checks the rule at each step."""

    def __init__(self, names: str, most: int, dying: frozenset[int]) -> None:
        self.seats = Seats(names, most, TURN_S)
        self.most = most
        self.now = 0.0
        self.events: list[Event] = []
        self.arrived: dict[int, tuple[str, float, float]] = {}
        self.waits: list[float] = []
        self.running = dict.fromkeys(names, 0)
        self.since = dict.fromkeys(names, 0.0)
        self.dying = dying
        self.loads = 0
        self.numbers = count()

    def push(self, delay: float, what: str, name: str, value: float = 0.0) -> None:
        heapq.heappush(self.events, Event(self.now + delay, next(self.numbers), what, name, value))

    def run(self) -> None:
        while self.events:
            event = heapq.heappop(self.events)
            self.now = event.at
            getattr(self, event.what)(event.name, event.value)
            self.decide()
        assert not any(seat.waiting for seat in self.seats.seats.values()), "a request waits forever"

    def arrive(self, name: str, seconds: float) -> None:
        ticket = self.seats.arrive(name, self.now)
        if ticket is None:
            self.begin(name, seconds, 0.0)
        else:
            self.arrived[ticket] = (name, self.now, seconds)

    def begin(self, name: str, seconds: float, waited: float) -> None:
        self.waits.append(waited)
        self.running[name] += 1
        self.push(seconds, "end", name, self.seats.seats[name].life)

    def end(self, name: str, life: float) -> None:
        if self.seats.seats[name].life == life:
            self.running[name] -= 1
        self.seats.leave(name, int(life), self.now)

    def load(self, name: str, cost: float) -> None:
        admissions = self.seats.loaded(name, self.now, cost)
        self.since[name] = self.now
        self.admit(admissions)
        if self.loads in self.dying:
            self.push(1.0, "die", name, self.seats.seats[name].life)

    def die(self, name: str, life: float) -> None:
        seat = self.seats.seats[name]
        if seat.life == life and seat.standing in (Standing.IN, Standing.CLOSED):
            self.running[name] = 0
            self.seats.gone(name)

    def evicted(self, name: str, _: float) -> None:
        self.seats.gone(name)

    def wake(self, name: str, _: float) -> None:
        """The time at which the rule asked to be asked again."""

    def admit(self, admissions: list[tuple[int, int]]) -> None:
        for ticket, life in admissions:
            name, at, seconds = self.arrived.pop(ticket)
            assert life == self.seats.seats[name].life
            self.begin(name, seconds, self.now - at)

    def decide(self) -> None:
        decision = self.seats.decide(self.now)
        self.admit(decision.let_in)
        for name in decision.load:
            self.loads += 1
            self.push(LOAD_S, "load", name, LOAD_S)
        for name in decision.evict:
            seat = self.seats.seats[name]
            assert self.running[name] == 0, "a busy model was evicted"
            idle = self.now >= seat.used + LINGER_LOADS * LOAD_S - SLACK_S
            whole_turn = self.now >= self.since[name] + max(TURN_S, TURN_LOADS * LOAD_S) - SLACK_S
            assert idle or whole_turn, "a model in use lost its turn"
            self.push(EVICT_S, "evicted", name)
        taken = [seat for seat in self.seats.seats.values() if seat.standing is not Standing.OUT]
        assert len(taken) <= self.most, "more models are loaded than may be"
        wanted = any(seat.waiting for seat in self.seats.seats.values() if seat.standing is Standing.OUT)
        if wanted and len(taken) < self.most:
            raise AssertionError("a seat is free and a request waits for one")
        if decision.again_at is not None:
            self.push(decision.again_at - self.now, "wake", "")


arrivals = st.lists(
    st.tuples(st.floats(0, 60, allow_nan=False), st.sampled_from("abcd"), st.floats(0.1, LONGEST_S, allow_nan=False)),
    min_size=1,
    max_size=60,
)


@given(arrivals=arrivals, most=st.integers(1, 3), dying=st.frozensets(st.integers(1, 20), max_size=4))
def test_the_rule_holds_for_any_crowd(
    arrivals: list[tuple[float, str, float]], most: int, dying: frozenset[int]
) -> None:
    world = World("abcd", most, dying)
    for at, name, seconds in arrivals:
        world.push(at, "arrive", name, seconds)
    world.run()
    assert len(world.waits) == len(arrivals)
    exchange = max(TURN_S, TURN_LOADS * LOAD_S) + LONGEST_S + EVICT_S + LOAD_S
    # Its own model may have just been closed; then each of the others is before it at most once.
    assert max(world.waits) <= 4 * exchange + len(dying) * (LOAD_S + EVICT_S + 1)


@given(seconds=st.floats(0.1, LONGEST_S, allow_nan=False))
def test_two_models_that_are_always_wanted_share_the_time(seconds: float) -> None:
    world = World("ab", 1, frozenset())
    for step in range(400):
        for name in "ab":
            world.push(step * 0.5, "arrive", name, seconds)
    world.run()
    assert len(world.waits) == 800
    assert world.loads <= 2 + 200 / (max(TURN_S, TURN_LOADS * LOAD_S) + LOAD_S + EVICT_S) + 2
