"""`Seats`: which models are loaded, and who goes when another one is needed. It decides only; it has no clock.

There are `most` seats. A model takes one from the beginning of its load until its memory is free again. The rule:

- **In**: a request for a model that is in is let in at once. Any other request waits. Models that are out and for which
  requests wait get seats in the order of their oldest waiting request.
- **A free seat** is taken at once.
- **An idle model goes first**: one without requests for a quarter of the seconds that it took to load (its linger), so
  that a client with one request after the other does not lose it in between. Of several, the least recently used.
- **A busy model goes when its turn is over**: a turn is `turn_s` seconds, or four times the seconds that the model
  took to load, whichever is longer. Of several, the one that has been in longest. It is closed: its later requests wait
  like those for other models, those it has finish, then it goes. No request is aborted.
- A closed model that is no longer in anyone's way opens again.

Between its load and the moment at which it is closed a model therefore has a whole turn, or was idle: if several models
are always wanted, at most a fifth of the time is spent on loads, however short `turn_s` is. No request starves: it
waits at most until each of the models before its own has had a turn, has finished its requests and was exchanged.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from enum import Enum

TURN_LOADS = 4
"""A turn lasts at least this many times a load."""
LINGER_LOADS = 0.25


class Standing(Enum):
    """Where a model stands.

    OUT: it has no seat. LOADING: it has one and is not ready. IN: it takes requests. CLOSED: it finishes those it has.
    GOING: it has none, and its memory is being freed.
    """

    OUT = "out"
    LOADING = "loading"
    IN = "in"
    CLOSED = "closed"
    GOING = "going"


@dataclass(slots=True)
class Seat:
    """One model. Times are seconds of any one clock.

    Attributes:
        running: requests let in that have not ended.
        waiting: ticket -> arrival.
        life: counts the times it was in; requests of an earlier one don't count any more.
        since: when it was last ready.
        used: when its last request came or ended.
        cost: seconds that its last load took.
    """

    name: str
    standing: Standing = Standing.OUT
    running: int = 0
    waiting: dict[int, float] = field(default_factory=dict)
    life: int = 0
    since: float = 0.0
    used: float = 0.0
    cost: float = 0.0

    @property
    def oldest(self) -> float:
        """Arrival of the request that has waited longest."""
        return min(self.waiting.values())


Admission = tuple[int, int]
"""A ticket, and the model's life to name when its request ends."""


@dataclass(frozen=True, slots=True)
class Decision:
    """What to do now.

    Attributes:
        load: models that got a seat; report `loaded` or `failed`.
        evict: models whose memory is to be freed; report `gone`.
        let_in: tickets that wait no longer, each with the life of its model.
        again_at: when to decide again if nothing happens before; None if only events can change something.
    """

    load: list[str]
    evict: list[str]
    let_in: list[Admission]
    again_at: float | None


class Seats:
    """The state of all models. After every event, call `decide`.

    Args:
        most: models that may be loaded at once.
        turn_s: least seconds of a busy model's turn.
        idle_s: seconds without requests after which a model goes although its seat is not needed; None for never.
    """

    def __init__(self, names: Iterable[str], most: int, turn_s: float, idle_s: float | None = None) -> None:
        self.seats = {name: Seat(name) for name in names}
        self._most = most
        self._turn_s = turn_s
        self._idle_s = idle_s
        self._tickets = 0

    def arrive(self, name: str, now: float) -> int | None:
        """Take a request. Return None if it is let in, else the ticket with which it waits."""
        seat = self.seats[name]
        seat.used = now
        if seat.standing is Standing.IN:
            seat.running += 1
            return None
        self._tickets += 1
        seat.waiting[self._tickets] = now
        return self._tickets

    def withdraw(self, name: str, ticket: int) -> None:
        """Forget a request that no longer waits."""
        self.seats[name].waiting.pop(ticket, None)

    def leave(self, name: str, life: int, now: float) -> None:
        """End a request that was let in while the model had this `life`."""
        seat = self.seats[name]
        if seat.life == life:
            seat.running -= 1
            seat.used = now

    def loaded(self, name: str, now: float, seconds: float) -> list[Admission]:
        """Note that a model is ready, after `seconds`. Return the tickets that this lets in."""
        seat = self.seats[name]
        seat.life += 1
        seat.standing, seat.since, seat.used, seat.cost, seat.running = Standing.IN, now, now, seconds, 0
        return self._let_in(seat)

    def failed(self, name: str) -> list[int]:
        """Note that a load failed. Return the tickets that waited for it."""
        seat = self.seats[name]
        seat.standing = Standing.OUT
        tickets = list(seat.waiting)
        seat.waiting.clear()
        return tickets

    def gone(self, name: str) -> None:
        """Note that a model's memory is free, also if its process has died."""
        seat = self.seats[name]
        seat.standing, seat.running = Standing.OUT, 0
        seat.life += 1

    def decide(self, now: float) -> Decision:
        """Apply the rule."""
        evict = [seat for seat in self._at(Standing.CLOSED) if not seat.running]
        for seat in evict:
            seat.standing = Standing.GOING
        wanted = sorted((seat for seat in self._at(Standing.OUT) if seat.waiting), key=lambda seat: seat.oldest)
        free = self._most - sum(seat.standing is not Standing.OUT for seat in self.seats.values())
        load = wanted[: max(free, 0)]
        for seat in load:
            seat.standing = Standing.LOADING
        lacking = len(wanted) - len(load) - len(self._at(Standing.CLOSED, Standing.GOING))
        let_in = [admission for _ in range(-lacking) for admission in self._reopen()]
        for _ in range(lacking):
            victim = self._victim(now)
            if victim is None:
                break
            victim.standing = Standing.CLOSED if victim.running else Standing.GOING
            evict += [] if victim.running else [victim]
        for seat in self._at(Standing.IN):
            if self._idle_s is not None and not seat.running and now - seat.used >= self._idle_s:
                seat.standing = Standing.GOING
                evict.append(seat)
        names = [seat.name for seat in load], [seat.name for seat in evict]
        return Decision(*names, let_in, self._again_at(now, contended=lacking > 0))

    def turn(self, seat: Seat) -> float:
        """Return the seconds for which a busy model can't be displaced."""
        return max(self._turn_s, TURN_LOADS * seat.cost)

    def linger(self, seat: Seat) -> float:
        """Return the seconds after its last request for which a model counts as busy."""
        return LINGER_LOADS * seat.cost

    def _at(self, *standings: Standing) -> list[Seat]:
        return [seat for seat in self.seats.values() if seat.standing in standings]

    def _victim(self, now: float) -> Seat | None:
        """Return the model that goes next; None if none has to."""
        present = self._at(Standing.IN)
        idle = [seat for seat in present if not seat.running and now >= seat.used + self.linger(seat)]
        if idle:
            return min(idle, key=lambda seat: seat.used)
        over = [seat for seat in present if now >= seat.since + self.turn(seat)]
        return min(over, key=lambda seat: seat.since, default=None)

    def _reopen(self) -> Collection[Admission]:
        """Open the closed model that was closed last, if there is one. Return the tickets that this lets in."""
        closed = self._at(Standing.CLOSED)
        if not closed:
            return ()
        seat = max(closed, key=lambda seat: seat.since)
        seat.standing = Standing.IN
        return self._let_in(seat)

    def _let_in(self, seat: Seat) -> list[Admission]:
        tickets = [(ticket, seat.life) for ticket in seat.waiting]
        seat.running += len(tickets)
        seat.waiting.clear()
        return tickets

    def _again_at(self, now: float, *, contended: bool) -> float | None:
        times = []
        for seat in self._at(Standing.IN):
            if contended:
                times.append(seat.since + self.turn(seat))
                times += [] if seat.running else [seat.used + self.linger(seat)]
            if self._idle_s is not None and not seat.running:
                times.append(seat.used + self._idle_s)
        return min((time for time in times if time > now), default=None)
