"""Pauses and sleeps of an engine loop on the toy device, which checks every KV cell that it reads."""

from __future__ import annotations

import random

import msgspec
import pytest

from octavo.cache.cache import KVCache
from octavo.core.errors import EngineStateError, InvalidRequestError
from octavo.core.output import FinishReason, TokenDelta
from octavo.core.params import SamplingParams
from octavo.core.pausing import AWAKE, PauseMode, SleepTag
from octavo.core.request import GenerateRequest, answers_to
from octavo.engine.executor import FixedWorker
from octavo.engine.loop import EngineLoop
from octavo.engine.toy import ToyDevice, toy_generate
from octavo.schedule.hooks import EngineHook
from octavo.schedule.policy import make_policy
from octavo.schedule.scheduler import Limits, Scheduler

BLOCKS, BLOCK = 64, 4


class Dormitory(FixedWorker):
    """A worker that sleeps and comes back with an empty KV cache. `broken` parts can't be had again, and a `sleepless`
    worker fails to sleep."""

    can_sleep = True

    def __init__(self):
        self.slept, self.woken, self.broken = [], [], set()
        self.sleepless = False

    def sleep(self, level):
        if self.sleepless:
            raise OSError("no memory is left on the host")
        self.slept.append(level)

    def wake_up(self, part):
        if part in self.broken:
            raise OSError("the file is gone")
        self.woken.append(part)

    def executor(self):
        return ToyDevice(BLOCKS, BLOCK)


class Refusing(EngineHook):
    """A feature that refuses each request for it, but only once it is queued."""

    name = "refusing"

    def namespace(self, spec):
        raise InvalidRequestError("no", param="refusing")


class Broken(EngineHook):
    """A feature with a bug: it fails on each new request for it."""

    name = "broken"

    def namespace(self, spec):
        raise KeyError("an adapter")


def make_loop(*, depth=0, sleeper=None, hooks=()):
    limits = Limits(max_num_seqs=4, max_num_batched_tokens=32, max_model_len=120, max_ahead=depth + 1)
    scheduler = Scheduler(KVCache(BLOCKS, BLOCK), limits, make_policy("fcfs"), hooks=hooks)
    return EngineLoop(scheduler, ToyDevice(BLOCKS, BLOCK), depth, worker=sleeper)


def ask(name, *, length=10, options=None, **params):
    prompt = [ord(char) for char in name] * 3
    params = SamplingParams(seed=0, max_tokens=length, ignore_eos=True, **params)
    return GenerateRequest(id=name, tokens=prompt, params=params, options=options or {})


def expected(request):
    return toy_generate(request.tokens, request.params.max_tokens, stop_ids=())


class Story:
    """All that a loop told."""

    def __init__(self, loop):
        self.loop, self.tokens, self.ends, self.errors = loop, {}, {}, {}

    def take(self, news: list[TokenDelta]):
        for delta in news:
            self.tokens.setdefault(delta.id, []).extend(delta.tokens)
            if delta.finish is not None:
                self.ends[delta.id], self.errors[delta.id] = delta.finish, delta.error

    def step(self, times=1):
        for _ in range(times):
            self.take(self.loop.step())

    def settle(self):
        while not self.loop.settled:
            self.step()

    def finish(self):
        while self.loop.busy:
            self.step()
        self.loop.check_idle()


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("mode", list(PauseMode))
def test_a_pause_does_with_requests_as_its_mode_says(mode, depth):
    loop = make_loop(depth=depth)
    story = Story(loop)
    early, late = ask("early"), ask("late")
    loop.add(early)
    story.step(4)
    story.take(loop.pause(mode))
    loop.add(late)
    story.settle()
    assert loop.stats().paused
    assert "late" not in story.tokens, "nothing new is begun"
    kept = list(story.tokens["early"])
    if mode is PauseMode.KEEP:
        assert 0 < len(kept) < 10
        assert not loop.busy
        assert loop.stats().num_waiting + loop.stats().num_running == 2
        loop.check_idle()
        story.step(3)
        assert story.tokens["early"] == kept, "who steps it all the same changes nothing"
    else:
        assert story.ends["early"] is (FinishReason.ABORT if mode is PauseMode.ABORT else FinishReason.LENGTH)
        assert loop.stats().num_waiting == 1
    story.take(loop.resume())
    story.finish()
    assert not loop.stats().paused
    assert story.tokens["late"] == expected(late)
    whole = expected(early)
    assert story.tokens["early"] == (whole[: len(kept)] if mode is PauseMode.ABORT else whole)


def test_a_later_pause_takes_the_place_of_one_before():
    loop = make_loop()
    story = Story(loop)
    loop.add(ask("a"))
    story.step(2)
    story.take(loop.pause(PauseMode.KEEP))
    assert loop.settled
    story.take(loop.pause(PauseMode.WAIT))
    assert not loop.settled
    story.settle()
    assert story.tokens["a"] == expected(ask("a"))
    loop.resume()
    loop.resume()
    assert not loop.paused


def test_who_waits_at_the_gate_may_leave_and_is_checked():
    loop = make_loop()
    story = Story(loop)
    story.take(loop.pause(PauseMode.ABORT))
    with pytest.raises(InvalidRequestError, match="maximum context length is 120"):
        loop.add(ask("long", length=200))
    loop.add(ask("leaves", n=2, temperature=1.0))
    loop.add(ask("stays"))
    assert loop.stats().num_waiting == 3
    assert [delta.finish for delta in loop.abort("leaves")] == [FinishReason.ABORT] * 2
    story.take(loop.resume())
    story.finish()
    assert story.tokens == {"stays": expected(ask("stays"))}


def test_a_held_request_that_would_be_refused_can_be_aborted():
    loop = make_loop(hooks=[Refusing()])
    loop.pause(PauseMode.KEEP)
    loop.add(ask("a", n=2, options={"refusing": msgspec.Raw(b"\x90")}))
    assert [(delta.index, delta.finish) for delta in loop.abort("a")] == [
        (0, FinishReason.ABORT),
        (1, FinishReason.ABORT),
    ]
    assert loop.stats().num_waiting == 0
    assert loop.resume() == []


def test_a_held_request_that_can_not_be_queued_ends_alone():
    loop = make_loop(hooks=[Broken()])
    story = Story(loop)
    loop.pause(PauseMode.KEEP)
    for name, options in (("a", {}), ("b", {"broken": msgspec.Raw(b"\x90")}), ("c", {})):
        loop.add(ask(name, options=options))
    story.take(loop.resume())
    assert story.ends == {"b": FinishReason.ERROR}
    assert story.errors["b"] == "Internal error: KeyError: 'an adapter'"
    story.finish()
    assert story.tokens["a"] == expected(ask("a"))
    assert story.tokens["c"] == expected(ask("c"))


@pytest.mark.parametrize("held", [True, False])
def test_a_name_in_use_is_refused_in_a_pause_too(held):
    loop = make_loop()
    story = Story(loop)
    if not held:
        loop.add(ask("a"))
        story.step(2)
    loop.pause(PauseMode.KEEP)
    if held:
        loop.add(ask("a"))
    with pytest.raises(InvalidRequestError, match="request_id is in use"):
        loop.add(ask("a", length=3))
    story.take(loop.resume())
    story.finish()
    assert story.tokens == {"a": expected(ask("a"))}


def test_a_choice_of_a_held_request_ends_alone_and_the_others_wait_for_the_end_of_the_pause():
    loop = make_loop()
    story = Story(loop)
    loop.pause(PauseMode.ABORT)
    loop.add(ask("a", n=2))
    assert [(delta.index, delta.finish) for delta in loop.abort("a", 1)] == [(1, FinishReason.ABORT)]
    assert loop.abort("a", 1) == []
    assert (loop.busy, loop.stats().num_waiting) == (False, 1)
    story.take(loop.resume())
    assert not story.ends
    story.finish()
    assert story.tokens["a"] == expected(ask("a"))


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("level", [1, 2])
def test_what_stands_still_in_a_sleep_is_computed_again(level, depth):
    sleeper = Dormitory()
    loop = make_loop(depth=depth, sleeper=sleeper)
    story = Story(loop)
    requests = [ask(name, length=12) for name in ("ab", "cd", "ef", "gh", "waits")]
    for request in requests:
        loop.add(request)
    story.step(5)
    story.take(loop.pause(PauseMode.KEEP))
    story.settle()
    loop.sleep(level)
    assert (loop.stats().sleep_level, loop.stats().num_blocks_used) == (level, 0)
    late = ask("late")
    loop.add(late)
    for mode in PauseMode:
        if mode is not PauseMode.ABORT:
            story.take(loop.pause(mode))
            assert loop.settled, "a pause in a sleep wakes nobody"
    with pytest.raises(EngineStateError, match="sleeps"):
        loop.resume()
    story.take(loop.wake_up([SleepTag.KV_CACHE]))
    assert loop.stats().sleep_level == level
    assert not loop.busy
    story.take(loop.wake_up(SleepTag))
    assert loop.stats().sleep_level == AWAKE
    story.finish()
    assert story.tokens == {one.id: expected(one) for one in [*requests, late]}
    assert (sleeper.slept, sleeper.woken) == ([level], [SleepTag.KV_CACHE, SleepTag.WEIGHTS])


def test_sleep_deepens_and_is_repeated_without_harm():
    sleeper = Dormitory()
    loop = make_loop(sleeper=sleeper)
    loop.pause(PauseMode.ABORT)
    for level in (0, 0, 1, 0, 2, 1):
        loop.sleep(level)
    assert (sleeper.slept, loop.stats().sleep_level) == ([1, 2], 2)
    loop.wake_up(SleepTag)
    loop.wake_up(SleepTag)
    assert not loop.paused
    story = Story(loop)
    loop.add(ask("a"))
    story.finish()
    assert story.tokens["a"] == expected(ask("a"))


def test_a_wake_up_that_fails_can_be_tried_again():
    sleeper = Dormitory()
    loop = make_loop(sleeper=sleeper)
    loop.pause(PauseMode.ABORT)
    loop.sleep(2)
    sleeper.broken = {SleepTag.WEIGHTS}
    with pytest.raises(OSError, match="gone"):
        loop.wake_up(SleepTag)
    assert loop.stats().sleep_level == 2
    sleeper.broken = set()
    loop.wake_up(SleepTag)
    assert loop.stats().sleep_level == AWAKE


def test_a_wake_up_repairs_what_a_sleep_that_failed_left_behind():
    sleeper = Dormitory()
    loop = make_loop(sleeper=sleeper)
    story = Story(loop)
    loop.add(ask("a"))
    story.step(2)
    story.take(loop.pause(PauseMode.KEEP))
    story.settle()
    sleeper.sleepless = True
    for _ in range(2):
        with pytest.raises(OSError, match="no memory"):
            loop.sleep(1)
        assert (loop.stats().sleep_level, loop.stats().paused) == (1, True)
    with pytest.raises(EngineStateError, match="sleeps"):
        loop.resume()
    story.take(loop.wake_up(SleepTag))
    story.finish()
    assert story.tokens["a"] == expected(ask("a"))


def test_a_sleep_that_failed_can_be_tried_again():
    sleeper = Dormitory()
    loop = make_loop(sleeper=sleeper)
    loop.pause(PauseMode.ABORT)
    sleeper.sleepless = True
    with pytest.raises(OSError, match="no memory"):
        loop.sleep(1)
    sleeper.sleepless = False
    loop.sleep(1)
    loop.sleep(1)
    assert sleeper.slept == [1]


@pytest.mark.parametrize(
    ("part", "again", "level"),
    [(SleepTag.WEIGHTS, 2, 2), (SleepTag.WEIGHTS, 1, 1), (SleepTag.KV_CACHE, 2, 2), (SleepTag.KV_CACHE, 1, 2)],
)
def test_a_part_that_was_woken_sleeps_again(part, again, level):
    sleeper = Dormitory()
    loop = make_loop(sleeper=sleeper)
    loop.pause(PauseMode.ABORT)
    loop.sleep(2)
    loop.wake_up([part])
    loop.sleep(again)
    assert (sleeper.slept, loop.stats().sleep_level) == ([2, level], level)
    loop.wake_up([part])
    assert loop.stats().sleep_level == level
    loop.wake_up(SleepTag)
    assert loop.stats().sleep_level == AWAKE


def test_memory_is_kept_where_the_engine_was_not_started_for_sleep():
    loop = make_loop()
    loop.pause(PauseMode.ABORT)
    with pytest.raises(EngineStateError, match="--enable-sleep-mode"):
        loop.sleep(1)
    loop.sleep(0)
    assert loop.stats().sleep_level == 0
    loop.wake_up([SleepTag.WEIGHTS])
    assert loop.paused
    loop.wake_up([SleepTag.SCHEDULING])
    assert not loop.paused


def test_whenever_it_pauses_and_however_deep_it_sleeps_the_tokens_are_the_same():
    for trial in range(40):
        dice = random.Random(trial)
        loop = make_loop(depth=trial % 2, sleeper=Dormitory())
        story = Story(loop)
        requests = [ask(f"{trial}-{i}", length=dice.randrange(1, 20)) for i in range(8)]
        coming = list(requests)
        while coming or loop.busy or loop.paused:
            if coming and dice.random() < 0.4:
                loop.add(coming.pop())
            match dice.randrange(8):
                case 0:
                    story.take(loop.pause(dice.choice([PauseMode.WAIT, PauseMode.KEEP])))
                case 1 if loop.settled:
                    loop.sleep(dice.randrange(3))
                case 2:
                    story.take(loop.wake_up(SleepTag))
                case 3 if loop.stats().sleep_level == AWAKE:
                    story.take(loop.resume())
                case _ if loop.busy:
                    story.step()
        story.finish()
        assert story.tokens == {one.id: expected(one) for one in requests}, trial


@pytest.mark.parametrize("name", ["chatcmpl-a-b", "a-b"])
def test_a_request_answers_to_the_names_known_outside(name):
    assert answers_to("chatcmpl-a-b-0123456789ab", name)
    assert not answers_to("chatcmpl-a-b-c-0123456789ab", name)


@pytest.mark.parametrize("name", ["", "b", "chatcmpl", "chatcmpl-a-b-0123456789ab"])
def test_a_request_does_not_answer_to_parts_of_its_name(name):
    assert not answers_to("chatcmpl-a-b-0123456789ab", name)
