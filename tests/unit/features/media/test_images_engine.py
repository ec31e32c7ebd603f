"""The engine half: which images are encoded when, and which are kept."""

from __future__ import annotations

from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from octavo.core.errors import EngineStateError
from octavo.core.plan import PlanDraft
from octavo.features.media.engine import MediaEngine
from octavo.features.media.payload import NAME, EmbedPiece, MediaInfo, MediaItem, MediaStep
from octavo.features.media.positions import Positions


def item(name: str, start: int, count: int = 4, layout: tuple[int, ...] = ()) -> MediaItem:
    return MediaItem(name.encode(), (1, 2, 2, 3), layout, count, [(start, 0, count)], memoryview(b"x" * 12))


class Worker:
    """A worker half that encodes on request of the test."""

    awake = True

    def __init__(self, capacity: int, budget: int = 4) -> None:
        self.facts = {"capacity": capacity, "budget": budget}
        self.kept: set[bytes] = set()
        self.asked: list[list[bytes]] = []
        self.under_way: list[bytes] = []
        self.waiting: Future[list[Any]] | None = None

    def call(self, method: str, args: dict[str, Any]) -> Future[list[Any]]:
        future: Future[list[Any]] = Future()
        if method == "describe":
            future.set_result([self.facts])
            return future
        assert set(args["keep"]) <= self.kept
        self.under_way += [one[0] for one in args["items"]]
        if args["items"]:
            self.asked.append([one[0] for one in args["items"]])
            self.kept = {*args["keep"]}
        self.waiting = future
        return future

    def finish(self, *errors: str, count: int = 100) -> None:
        """Answer the last call for `count` items, with these errors if any."""
        assert self.waiting is not None
        ended, self.under_way = self.under_way[:count], self.under_way[count:]
        done = [[name, error] for name, error in zip(ended, [*errors, *[""] * len(ended)], strict=False)]
        future, self.waiting = self.waiting, None
        self.kept |= {name for name, error in done if not error}
        future.set_result([{"done": done, "left": len(self.under_way), "seconds": 0.5}])


class Asked(SimpleNamespace):
    """What the hook reads of a request."""

    __hash__ = object.__hash__  # type: ignore[assignment]
    __eq__ = object.__eq__


def started(capacity: int, *requests: Any, budget: int = 4, axes: bool = False) -> tuple[MediaEngine, Worker]:
    worker = Worker(capacity, budget)
    engine = MediaEngine(MediaInfo(), axes=axes)
    engine.attach(worker)  # type: ignore[arg-type]
    for one in requests:
        engine.on_add(one)
    return engine, worker


def asked(*items: MediaItem, slot: int = -1) -> Any:
    spec = SimpleNamespace(options={NAME: msgspec.Raw(msgspec.msgpack.encode(list(items)))})
    return Asked(spec=spec, num_computed=0, num_prompt=40, slot=slot)


def test_a_request_waits_until_its_images_are_encoded() -> None:
    one = asked(item("a", 3))
    engine, worker = started(8, one)
    assert (engine.admit(one, 30), engine.waits_for(one), engine.awaits) == (0, "images to be encoded", True)
    engine.turn()
    assert (worker.asked, engine.admit(one, 30)) == ([[b"a"]], 0)
    engine.turn()
    assert len(worker.asked) == 1, "it is under way"
    worker.finish()
    engine.turn()
    assert (engine.admit(one, 30), engine.waits_for(one)) == (30, "")
    engine.on_release(one)
    engine.turn()
    assert not engine.awaits
    assert {metric.name: metric.values[""] for metric in engine.metrics()} == {
        "images_encoded": 1,
        "image_encode_seconds": 0.5,
        "mm_cache_queries": 1,
        "mm_cache_hits": 0,
        "mm_cache_tokens": 4,
    }


def test_only_images_among_the_tokens_to_compute() -> None:
    one = asked(item("a", 3), item("b", 20))
    engine, worker = started(8, one)
    one.num_computed = 7  # a prefix with the first image was found
    assert engine.admit(one, 10) == 10
    engine.turn()
    assert not worker.asked
    assert engine.admit(one, 14) == 0
    engine.turn()
    assert worker.asked == [[b"b"]]


def test_equal_images_are_encoded_once() -> None:
    first, second = asked(item("a", 3), item("a", 10)), asked(item("a", 5))
    engine, worker = started(8, first, second)
    assert [engine.admit(one, 30) for one in (first, second)] == [0, 0]
    engine.turn()
    worker.finish()
    engine.turn()
    assert worker.asked == [[b"a"]]
    assert [engine.admit(one, 30) for one in (first, second)] == [30, 30]


def test_some_between_two_steps() -> None:
    one = asked(item("a", 0), item("b", 10), item("c", 20))
    engine, worker = started(12, one, budget=8)
    for _ in range(2):
        assert engine.admit(one, 30) == 0
        engine.turn()
        worker.finish()
        engine.turn()
    assert worker.asked == [[b"a", b"b"], [b"c"]]
    assert engine.admit(one, 30) == 30


def test_what_some_ranks_have_encoded_is_kept() -> None:
    one = asked(item("a", 3))
    engine = MediaEngine(MediaInfo(), axes=False)
    calls: list[tuple[dict[str, Any], Future[list[Any]]]] = []

    def call(method: str, args: dict[str, Any]) -> Future[list[Any]]:
        future: Future[list[Any]] = Future()
        if method == "describe":
            future.set_result([{"capacity": 8, "budget": 4}])
        else:
            calls.append((args, future))
        return future

    engine.attach(SimpleNamespace(awake=True, call=call))  # type: ignore[arg-type]
    engine.on_add(one)
    engine.admit(one, 30)
    engine.turn()
    done, working = ({"done": [[b"a", ""]], "left": 0, "seconds": 0.0}, {"done": [], "left": 1, "seconds": 0.0})
    calls[0][1].set_result([done, working])
    assert engine.admit(one, 30) == 0
    engine.turn()
    assert calls[1][0]["keep"] == [b"a"], "which the first rank has"
    calls[1][1].set_result([{**done, "done": []}, done])
    engine.turn()
    assert engine.admit(one, 30) == 30


def test_what_is_under_way_goes_on_between_steps() -> None:
    one = asked(item("a", 0), item("b", 10))
    engine, worker = started(12, one, budget=8)
    assert engine.admit(one, 30) == 0
    engine.turn()
    for count in (0, 1, 0, 1):
        worker.finish(count=count)
        assert engine.awaits
        engine.turn()
    assert worker.asked == [[b"a", b"b"]]
    assert engine.admit(one, 30) == 30


def test_more_images_than_fit_are_computed_in_chunks() -> None:
    one = asked(item("a", 2), item("b", 10), item("c", 20))
    engine, worker = started(8, one, budget=100)
    assert engine.admit(one, 30) == 0
    engine.turn()
    worker.finish()
    engine.turn()
    assert engine.admit(one, 30) == 20, "up to the third"
    one.num_computed = 20
    assert engine.admit(one, 10) == 0
    engine.turn()
    worker.finish()
    engine.turn()
    assert (engine.admit(one, 10), worker.kept) == (10, {b"b", b"c"})


def test_running_requests_come_first_and_others_keep_what_is_left() -> None:
    """Two requests that can't both have their images: the one with a slot goes on, though it asks later."""
    waiting, running = asked(item("a", 3), item("b", 10)), asked(item("c", 3), item("d", 10), slot=1)
    engine, worker = started(8, waiting, running, budget=100)
    assert [engine.admit(one, 30) for one in (waiting, running)] == [0, 0]
    engine.turn()
    assert worker.asked == [[b"c", b"d"]]
    worker.finish()
    assert [engine.admit(one, 30) for one in (waiting, running)] == [0, 0], "not taken in yet"
    engine.turn()
    assert [engine.admit(one, 30) for one in (waiting, running)] == [0, 30]
    engine.on_release(running)
    assert engine.admit(waiting, 30) == 0
    engine.turn()
    worker.finish()
    engine.turn()
    assert (engine.admit(waiting, 30), worker.kept) == (30, {b"a", b"b"})


def test_the_least_recently_used_is_dropped_first() -> None:
    engine, worker = started(8)
    for name in ("a", "b", "a", "c"):
        one = asked(item(name, 3))
        engine.on_add(one)
        if engine.admit(one, 30) == 0:
            engine.turn()
            worker.finish()
        engine.turn()
        assert engine.admit(one, 30) == 30
        engine.turn()
        engine.on_release(one)
    assert worker.kept == {b"a", b"c"}


def test_an_image_that_can_not_be_encoded_ends_its_requests_only() -> None:
    good, bad = asked(item("a", 3)), asked(item("b", 3))
    engine, worker = started(8, good, bad, budget=100)
    assert [engine.admit(one, 30) for one in (good, bad)] == [0, 0]
    engine.turn()
    worker.finish("", "no memory")
    engine.turn()
    assert engine.admit(good, 30) == 30
    with pytest.raises(EngineStateError, match="could not be encoded: no memory"):
        engine.admit(bad, 30)


def test_a_call_that_fails_ends_the_requests_that_it_was_for() -> None:
    one = asked(item("a", 3))
    engine, worker = started(8, one)
    engine.admit(one, 30)
    engine.turn()
    assert worker.waiting is not None
    worker.waiting.set_exception(RuntimeError("the rank is gone"))
    engine.turn()
    with pytest.raises(EngineStateError, match="the rank is gone"):
        engine.admit(one, 30)


def test_forgotten_images_are_encoded_again() -> None:
    one = asked(item("a", 3))
    engine, worker = started(8, one)
    for _ in range(2):
        assert engine.admit(one, 30) == 0
        engine.turn()
        worker.finish()
        engine.turn()
        assert engine.admit(one, 30) == 30
        engine.on_park()
        worker.kept.clear()
    assert worker.asked == [[b"a"], [b"a"]]


def test_the_payload_of_a_chunk() -> None:
    other, one = asked(item("z", 0)), asked(item("a", 3, 10))
    engine, _ = started(20, other, one)
    draft = PlanDraft(slots=[0, 1], num_tokens=[1, 6])
    other.num_computed, one.num_computed = 41, 11  # the other one generates; this one's tokens 5 to 10
    engine.on_plan(draft, [other, one])
    assert draft.payload[NAME] == MediaStep([EmbedPiece(b"a", 1, 2, 6)])
    draft = PlanDraft(slots=[1], num_tokens=[4])
    one.num_computed = 20
    engine.on_plan(draft, [one])
    assert not draft.payload, "of text only"


def test_positions_of_rows_and_columns() -> None:
    """Two images, of 2 x 3 and 1 x 2, among text."""
    items = [item("a", 2, 6, (2, 3)), item("b", 9, 2, (1, 2))]
    positions = Positions.of(items, 13)
    places = [[i + shift for shift in shifts] for i, shifts in enumerate(positions.shifts.tolist())]
    assert places == [
        *([i] * 3 for i in range(2)),
        *([2, 2 + row, 2 + column] for row in range(2) for column in range(3)),
        [5, 5, 5],
        [6, 6, 6],
        [6, 6, 7],
        [8, 8, 8],
        [9, 9, 9],
    ]
    assert positions.after == -3
    generated = memoryview(positions.between(12, 15)).cast("i").tolist()
    assert generated == [-3] * 9
