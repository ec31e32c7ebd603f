"""What a timeline says of requests that wait, lack blocks, are preempted, deferred, loaded and ended."""

from __future__ import annotations

import random

import msgspec
import pytest
from tier_kit import Shelf, ShelfMover

from octavo.cache.cache import KVCache
from octavo.core.cache_groups import FULL
from octavo.core.params import SamplingParams
from octavo.core.request import GenerateRequest
from octavo.engine.loop import EngineLoop
from octavo.engine.toy import ToyDevice
from octavo.features import FeatureContext
from octavo.features.timeline.engine import TimelineEngine, build_engine
from octavo.features.timeline.settings import TimelineSettings
from octavo.features.timeline.story import Found, Told
from octavo.features.timeline.watch import Timeline
from octavo.schedule.hooks import EngineHook
from octavo.schedule.policy import make_policy
from octavo.schedule.scheduler import Limits, Scheduler
from octavo.schedule.watcher import Watcher

BLOCK = 4


class Engine:
    """An engine on the toy device. Each step takes a second of the timeline's clock, which stands still meanwhile."""

    def __init__(self, num_blocks=64, *, seqs=8, budget=64, policy="fcfs", hooks=(), history=100, depth=0, mover=None):
        self.time = 1000.0
        self.timeline = Timeline(history, clock=lambda: self.time)
        self.hook = TimelineEngine(self.timeline)
        limits = Limits(
            max_num_seqs=seqs, max_num_batched_tokens=budget, max_model_len=num_blocks * BLOCK, max_ahead=depth + 1
        )
        self.cache = KVCache(num_blocks, BLOCK)
        self.scheduler = Scheduler(self.cache, limits, make_policy(policy), hooks=[*hooks, self.hook])
        self.device = ToyDevice(num_blocks, BLOCK, mover=mover)
        self.loop = EngineLoop(self.scheduler, self.device, depth)
        self.deltas = []

    def ask(self, name, prompt, max_tokens=4, priority=0, options=None, namespace="", **params):
        sampling = SamplingParams(max_tokens=max_tokens, seed=0, ignore_eos=True, **params)
        self.loop.add(
            GenerateRequest(
                id=name,
                tokens=list(prompt),
                params=sampling,
                priority=priority,
                options=options or {},
                namespace=namespace,
                arrival=self.time,
            )
        )

    def step(self, count=1):
        for _ in range(count):
            self.deltas += self.loop.step()
            self.time += 1

    def run(self):
        while self.loop.busy:
            self.step()
        return self

    def story(self, name, index=0):
        return next(story for story in self.timeline.find(name) if story.index == index)

    def misses(self, name):
        return [(one.reason, one.tokens, one.position) for one in self.story(name).misses]


@pytest.mark.parametrize(
    ("lacks", "limits"),
    [("seats", {"seqs": 1}), ("step_tokens", {"budget": 10}), ("kv_blocks", {"num_blocks": 5})],
)
def test_it_is_told_what_a_request_waited_for_and_how_long(lacks, limits):
    engine = Engine(**limits)
    engine.ask("first", range(10), max_tokens=4)
    if lacks == "step_tokens":
        engine.ask("second", range(20, 30), max_tokens=4)
        engine.ask("third", range(30, 40))
        engine.run()
        story = engine.story("third")
    else:
        engine.step()
        engine.ask("second", range(20, 30))
        engine.step()
        now = engine.story("second")
        assert (now.waiting_for, now.waits) == (lacks, {lacks: 1.0})
        engine.run()
        story = engine.story("second")
    waited = story.admitted - story.queued
    assert waited > 1
    assert story.waits == {lacks: waited}
    assert story.waiting_for == ""
    assert engine.timeline.waited[lacks] >= waited


def test_a_request_that_comes_during_a_step_waits_for_its_end():
    engine = Engine()
    engine.ask("first", range(10), max_tokens=8)
    engine.step()
    engine.ask("second", range(20, 30))
    engine.time += 0.25
    assert engine.story("second").waiting_for == "step"
    engine.run()
    assert engine.story("second").waits == {"step": 0.25}


def test_chunks_and_the_steps_of_decoding_are_counted():
    engine = Engine(budget=8)
    engine.ask("long", range(30), max_tokens=5)
    engine.run()
    story = engine.story("long")
    assert (story.chunks, story.cached, story.num_prompt) == (4, 0, 30)
    assert story.prompt_planned - story.admitted == 3
    assert (story.generated, story.finish) == (5, "length")
    assert (story.decode_steps, story.decode_rows, story.decode_prompt_tokens) == (4, 4, 0)
    assert story.ended - story.arrival == 7  # the clock stands still in the last step


def test_rows_of_others_are_counted():
    engine = Engine(budget=16)
    for name in range(3):
        engine.ask(str(name), [name, 40, 41], max_tokens=9)
    engine.step()
    engine.ask("prompt", range(30, 38), max_tokens=1)
    engine.run()
    story = engine.story("0")
    assert (story.decode_steps, story.decode_rows, story.decode_prompt_tokens) == (8, 8 * 3 + 1, 8)


@pytest.mark.parametrize("depth", [0, 1])
def test_a_preemption_says_for_whom_and_what_is_computed_again(depth):
    engine = Engine(num_blocks=10, depth=depth)
    for name, token in (("first", 1), ("second", 2)):
        engine.ask(name, [token] * 16, max_tokens=12)
    engine.run()
    story = engine.story("second")
    assert story.num_preemptions == 1
    (one,) = story.preemptions
    assert (one.cause, one.by) == ("kv_blocks", "first")
    assert one.computed >= 16
    assert one.resumed > one.at
    assert one.recomputed == engine.scheduler.stats().recomputed_tokens > 0
    assert engine.story("first").num_preemptions == 0
    kinds = [decision.kind for decision in engine.timeline.decisions(100) if decision.id == "second"]
    assert kinds == ["queued", "admitted", "preempted", "admitted", "ended"]
    assert "evicted" in {decision.kind for decision in engine.timeline.decisions(100)}


def test_all_other_causes_of_preemptions_are_told():
    engine = Engine(num_blocks=10, policy="priority")
    engine.ask("patient", [1] * 24, max_tokens=8, priority=5)
    engine.step(2)
    engine.ask("urgent", [2] * 24, max_tokens=4)
    engine.run()
    assert [(one.cause, one.by) for one in engine.story("patient").preemptions] == [("priority", "urgent")]
    failing = Engine()
    failing.device._fail_at = frozenset([1])
    failing.ask("one", range(8))
    failing.ask("two", range(10, 18))
    failing.run()
    assert {one.cause for name in ("one", "two") for one in failing.story(name).preemptions} == {"failed_step"}
    parked = Engine()
    parked.ask("one", range(8))
    parked.step()
    parked.scheduler.park()
    parked.run()
    assert [one.cause for one in parked.story("one").preemptions] == ["parked"]
    assert parked.story("one").preemptions[0].recomputed == 8


class Gate(EngineHook):
    """Holds requests with its option up."""

    name = "gate"
    opt_in = True
    open = False

    def admit(self, request, num_tokens):
        return num_tokens if self.open or self.name not in request.spec.options else 0

    def waits_for(self, request):
        return "" if self.open else "the gate (closed, 40 ms)"


def test_what_a_feature_makes_a_request_wait_for_is_told_apart_from_the_queue():
    gate = Gate()
    engine = Engine(seqs=2, hooks=[gate])
    engine.ask("held", range(10), options={"gate": msgspec.Raw(b"\xc3")})
    engine.ask("other", range(20, 30), max_tokens=3)
    engine.step(3)
    now = engine.story("held")
    assert now.waiting_for == "gate: the gate (closed, 40 ms)"
    assert engine.timeline.find("other")[0].admitted
    gate.open = True
    engine.run()
    story = engine.story("held")
    assert story.waits["gate: the gate"] >= 1
    assert sum(story.waits.values()) == story.admitted - story.queued
    deferred = [decision for decision in engine.timeline.decisions(100) if decision.kind == "deferred"]
    assert [(one.id, one.about) for one in deferred][:1] == [("held", "gate: the gate (closed, 40 ms)")]


def test_choices_wait_for_the_first_one_and_share_its_prompt():
    engine = Engine(budget=8)
    engine.ask("r", range(20), max_tokens=2, n=3)
    engine.run()
    first, second, third = (engine.story("r", index) for index in range(3))
    assert not first.forked
    assert second.forked
    assert third.forked
    assert "the prompt, which its first choice computes" in second.waits
    assert engine.timeline.missed == {**engine.timeline.missed, "new": 20, "last_block": 2}


def test_tokens_that_a_tier_loaded_are_told_apart():
    mover = ShelfMover(random.Random(0), FULL, latency=1.0)
    engine = Engine(num_blocks=12, hooks=[Shelf("shelf")], mover=mover)
    engine.ask("first", range(20), max_tokens=1)
    engine.run()
    engine.ask("pressure", range(20, 60), max_tokens=1)
    engine.run()
    engine.ask("again", range(20), max_tokens=1)
    engine.run()
    story = engine.story("again")
    assert story.cached == 16
    assert story.loaded == {"shelf": 16}
    assert "shelf: pages of its prompt" in story.waits
    assert engine.misses("again") == [("last_block", 4, 16)]


def test_every_reason_of_a_miss():
    engine = Engine(num_blocks=12)

    def ask(name, prompt, **options):
        engine.ask(name, prompt, max_tokens=1, **options)
        engine.run()
        return engine.misses(name)

    assert ask("new", range(10)) == [("new", 10, 0)]
    assert ask("same", range(10)) == [("last_block", 2, 8)]
    assert ask("other", [0, 1, 2, 3, 4, 5, 9, 9, 9]) == [("diverged", 5, 6)]
    assert ask("longer", [*range(10), 10, 11, 12, 13]) == [("new", 6, 8)]
    assert ask("salted", range(10), namespace="b") == [("namespace", 8, 0), ("last_block", 2, 8)]
    assert ask("logprobs", range(10), prompt_logprobs=1) == [("not_read", 10, 0)]
    engine.loop.reset_prefix_cache()
    engine.time += 7
    assert ask("reset", range(10)) == [("dropped", 8, 0), ("last_block", 2, 8)]
    assert engine.story("reset").misses[0].ago >= 7
    assert ask("pressure", range(10, 54)) == [("new", 44, 0)]
    assert ask("evicted", range(10)) == [("evicted", 4, 4), ("last_block", 2, 8)]
    assert engine.timeline.missed.total() == engine.scheduler.stats().prompt_tokens_computed


def test_the_answer_tells_no_client_of_prompts_in_other_namespaces():
    engine = Engine()
    asked = {"timeline": msgspec.Raw(b"\xc3")}
    engine.ask("mine", range(10), options=asked)
    engine.run()
    engine.ask("theirs", range(10), namespace="b", options=asked)
    engine.run()
    assert engine.misses("theirs")[0] == ("namespace", 8, 0)
    found = next(delta.found for delta in engine.deltas if delta.id == "theirs" and delta.finish)
    told = msgspec.msgpack.decode(found["timeline"], type=Found)
    assert [miss.reason for miss in told.misses] == ["new", "last_block"]
    assert told.before == []


def test_a_bounded_number_of_requests_is_kept_and_found_by_the_answers_id():
    engine = Engine(history=3)
    for number in range(5):
        engine.ask(f"chatcmpl-{number}-0a1b", [number] * 5)
        engine.run()
    assert engine.timeline.find("chatcmpl-1") == []
    assert [story.id for story in engine.timeline.find("chatcmpl-3")] == ["chatcmpl-3-0a1b"]
    assert [story.id for story in engine.timeline.find("3")] == ["chatcmpl-3-0a1b"]
    assert len(engine.timeline.slowest(10)) == 3
    assert not engine.timeline._following
    engine.ask("chatcmpl-3-ffff", [9] * 5)
    assert {story.id for story in engine.timeline.find("3")} == {"chatcmpl-3-0a1b", "chatcmpl-3-ffff"}


def test_answers_are_of_built_in_types_and_an_unknown_method_is_refused():
    engine = Engine()
    engine.ask("a", range(10))
    engine.step()
    found = engine.scheduler.call("timeline", "find", {"id": "a"})
    assert msgspec.json.decode(msgspec.json.encode(found)) == found
    told = msgspec.convert(found, Told)
    assert [story.id for story in told.stories] == ["a"]
    listed = engine.scheduler.call("timeline", "list", {"unfinished": 5, "slowest": 5, "decisions": 5})
    assert [story["id"] for story in listed["stories"]] == ["a"]
    assert [decision["kind"] for decision in listed["decisions"]] == ["queued", "admitted"]
    with pytest.raises(ValueError, match="no method 'nothing'"):
        engine.scheduler.call("timeline", "nothing", {})


class Failing(Watcher):
    def __init__(self, event):
        def fail(*about):
            self.calls += 1
            raise KeyError("a bug")

        self.calls = 0
        setattr(self, event, fail)


@pytest.mark.parametrize("event", ["queued", "planned", "admitted", "preempted", "ended", "removed"])
def test_a_watcher_that_fails_harms_nothing_and_is_called_no_more(event, caplog):
    hook = EngineHook()
    hook.watcher = Failing(event)
    engine = Engine(num_blocks=10, hooks=[hook])
    for name, token in (("first", 1), ("second", 2)):
        engine.ask(name, [token] * 16, max_tokens=12)
    engine.run()
    assert hook.watcher.calls == 1
    assert "no more events" in caplog.text
    assert {delta.finish for delta in engine.deltas if delta.finish} == {"length"}
    engine.scheduler.check_idle()


def test_steps_are_the_same_with_timelines_and_without():
    def plans(*hooks):
        cache = KVCache(24, BLOCK)
        limits = Limits(max_num_seqs=4, max_num_batched_tokens=16, max_model_len=96)
        scheduler = Scheduler(cache, limits, make_policy("priority"), hooks=hooks)
        device = ToyDevice(24, BLOCK)
        loop = EngineLoop(scheduler, device)
        made, forward = [], device.forward
        device.forward = lambda plan: (made.append(msgspec.msgpack.encode(plan)), forward(plan))[1]
        rng, told = random.Random(7), []
        for number in range(40):
            prompt = [1 + rng.randrange(3) for _ in range(rng.randrange(1, 40))]
            params = SamplingParams(max_tokens=rng.randrange(1, 20), seed=1, n=rng.choice([1, 1, 2]))
            loop.add(GenerateRequest(id=str(number), tokens=prompt, params=params, priority=rng.randrange(3)))
            told += [(one.id, one.index, one.tokens, one.finish) for _ in range(3) for one in loop.step()]
        while loop.busy:
            told += [(one.id, one.index, one.tokens, one.finish) for one in loop.step()]
        assert scheduler.stats().num_preemptions
        return made, told

    assert plans(TimelineEngine(Timeline(100))) == plans()


def test_the_warm_up_leaves_no_trace():
    engine = Engine()
    engine.ask("warm-up", range(8))
    engine.run()
    engine.loop.forget_past()
    assert engine.timeline.slowest(10) == engine.timeline.decisions(10) == []
    assert engine.timeline.missed.total() == 0
    engine.ask("first", range(8))
    engine.run()
    assert engine.misses("first") == [("new", 8, 0)]


def test_a_history_of_none_keeps_no_timelines():
    def built(history):
        settings = {"timeline": TimelineSettings(request_history=history)}
        return build_engine(
            FeatureContext(vocab_size=8, eos_token_ids=(), load_tokenizer=lambda: None, settings=settings)
        )

    assert built(0) is None
    assert built(5).watcher._ended.maxlen == 5
