"""The rule of who is loaded, without processes and without a clock."""

from __future__ import annotations

from octavo.pool.seats import Seats, Standing

TURN = 10.0


def seats(names: str = "ab", most: int = 1, idle_s: float | None = None) -> Seats:
    return Seats(names, most, TURN, idle_s)


def load(pool: Seats, name: str, now: float, cost: float = 1.0) -> int:
    """Ask for a model that is out, load it, and leave the request running. Return the model's life."""
    assert pool.arrive(name, now) is not None
    assert pool.decide(now).load == [name]
    return pool.loaded(name, now, cost)[-1][1]


def test_a_model_is_loaded_at_its_first_request_and_lets_in_what_waited() -> None:
    pool = seats()
    tickets = [pool.arrive("a", 0.0), pool.arrive("a", 0.5)]
    assert pool.decide(0.5).load == ["a"]
    assert pool.decide(0.6).load == []
    assert [ticket for ticket, _ in pool.loaded("a", 2.0, 1.5)] == tickets
    assert pool.arrive("a", 2.1) is None
    assert pool.seats["a"].running == 3


def test_an_idle_model_goes_once_its_linger_is_over() -> None:
    pool = seats()
    life = load(pool, "a", 0.0, cost=2.0)
    pool.leave("a", life, 1.0)
    pool.arrive("b", 1.2)
    decision = pool.decide(1.2)
    assert (decision.evict, decision.again_at) == ([], 1.5)
    assert pool.decide(1.5).evict == ["a"]
    assert pool.decide(1.6).load == []
    pool.gone("a")
    assert pool.decide(1.7).load == ["b"]


def test_a_busy_model_goes_after_its_turn_and_not_before_its_requests_have_ended() -> None:
    pool = seats()
    life = load(pool, "a", 0.0)
    ticket = pool.arrive("b", 1.0)
    assert pool.decide(1.0).again_at == TURN
    assert pool.arrive("a", 5.0) is None
    assert pool.decide(TURN).evict == []
    assert pool.seats["a"].standing is Standing.CLOSED
    late = pool.arrive("a", TURN + 1)
    assert late is not None
    pool.leave("a", life, TURN + 2)
    assert pool.decide(TURN + 2).evict == []
    pool.leave("a", life, TURN + 3)
    assert pool.decide(TURN + 3).evict == ["a"]
    pool.gone("a")
    assert pool.decide(TURN + 4).load == ["b"]
    assert pool.loaded("b", TURN + 5, 1.0) == [(ticket, 1)]


def test_a_turn_is_at_least_four_loads() -> None:
    pool = seats()
    load(pool, "a", 0.0, cost=20.0)
    pool.arrive("b", 0.0)
    assert pool.decide(79.0).again_at == 80.0
    pool.decide(80.0)
    assert pool.seats["a"].standing is Standing.CLOSED


def test_the_least_recently_used_idle_model_goes_first() -> None:
    pool = seats("abc", most=2)
    first, second = load(pool, "a", 0.0), load(pool, "b", 1.0)
    pool.leave("b", second, 2.0)
    pool.leave("a", first, 3.0)
    pool.arrive("c", 9.0)
    assert pool.decide(9.0).evict == ["b"]


def test_of_busy_models_the_one_that_has_been_in_longest_goes() -> None:
    pool = seats("abc", most=2)
    load(pool, "a", 0.0)
    load(pool, "b", 1.0)
    pool.arrive("c", 50.0)
    pool.decide(50.0)
    standings = {name: seat.standing for name, seat in pool.seats.items()}
    assert standings == {"a": Standing.CLOSED, "b": Standing.IN, "c": Standing.OUT}


def test_the_oldest_waiting_request_decides_which_model_is_next() -> None:
    pool = seats("abc")
    life = load(pool, "a", 0.0)
    pool.arrive("c", 1.0)
    pool.arrive("b", 2.0)
    pool.decide(TURN)
    pool.leave("a", life, TURN)
    assert pool.decide(TURN).evict == ["a"]
    pool.gone("a")
    assert pool.decide(TURN).load == ["c"]


def test_a_closed_model_opens_again_when_nobody_waits_for_its_seat() -> None:
    pool = seats()
    load(pool, "a", 0.0)
    ticket = pool.arrive("b", 1.0)
    assert ticket is not None
    pool.decide(TURN)
    late = pool.arrive("a", TURN + 1)
    pool.withdraw("b", ticket)
    assert pool.decide(TURN + 2).let_in == [(late, 1)]
    assert pool.seats["a"].standing is Standing.IN


def test_a_failed_load_returns_what_waited_and_leaves_the_seat() -> None:
    pool = seats()
    ticket = pool.arrive("a", 0.0)
    pool.decide(0.0)
    assert pool.failed("a") == [ticket]
    pool.arrive("b", 1.0)
    assert pool.decide(1.0).load == ["b"]


def test_requests_of_a_dead_process_do_not_count_for_the_next() -> None:
    pool = seats()
    life = load(pool, "a", 0.0)
    pool.gone("a")
    again = load(pool, "a", 1.0)
    pool.leave("a", life, 2.0)
    assert pool.seats["a"].running == 1
    pool.leave("a", again, 3.0)
    assert pool.seats["a"].running == 0


def test_an_idle_model_is_unloaded_after_the_idle_time() -> None:
    pool = seats(idle_s=30.0)
    life = load(pool, "a", 0.0)
    pool.leave("a", life, 5.0)
    assert pool.decide(6.0).again_at == 35.0
    assert pool.decide(35.0).evict == ["a"]
