"""Steps and features that fail: a search goes on as if nothing had been, and a feature's fault ends one request."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from octavo.cache.cache import KVCache
from octavo.core.output import FinishReason, TokenLogprobs
from octavo.core.params import RepetitionDetection, SamplingParams
from octavo.core.request import GenerateRequest
from octavo.engine.loop import EngineLoop
from octavo.engine.toy import VOCAB, ToyDevice, toy_generate
from octavo.schedule import endings
from octavo.schedule.beam import BeamGroup, Beams, BeamSearch
from octavo.schedule.hooks import EngineHook
from octavo.schedule.policy import make_policy
from octavo.schedule.room import Room
from octavo.schedule.scheduler import Limits, Scheduler

BLOCK = 4


class Reporting(ToyDevice):
    """Reports likely tokens, a fixed function of the whole context, so that beams have something to search."""

    def _sample(self, step):
        contexts = []
        for slot, inputs in zip(step.plan.slots, step.inputs, strict=True):
            state = self._slots[slot]
            contexts.append(state.tokens[: state.computed] + inputs)
        super()._sample(step)
        for row, context in enumerate(contexts):
            if step.plan.samples[row]:
                step.output.logprobs[row] = [likely(context)]


def likely(context: Sequence[int]) -> TokenLogprobs:
    draw = random.Random(hash(tuple(context)))
    tokens = draw.sample(range(VOCAB), 12)
    values = sorted((-5 * draw.random() for _ in tokens), reverse=True)
    return TokenLogprobs(logprob=values[0], rank=1, top_ids=tokens, top_logprobs=values)


class Engine:
    def __init__(
        self, device: ToyDevice, depth: int = 0, hooks: Sequence[EngineHook] = (), *, whole_prompts: bool = False
    ) -> None:
        limits = Limits(
            max_num_seqs=8,
            max_num_batched_tokens=16,
            max_model_len=256,
            max_ahead=depth + 1,
            whole_prompts=whole_prompts,
        )
        self.scheduler = Scheduler(KVCache(64, BLOCK), limits, make_policy("fcfs"), hooks=hooks)
        self.loop = EngineLoop(self.scheduler, device, depth)
        self.deltas = []

    def ask(self, name, prompt, **params):
        sampling = SamplingParams(**{"max_tokens": 8, "ignore_eos": True, "seed": 0, **params})
        self.loop.add(GenerateRequest(id=name, tokens=list(prompt), params=sampling))

    def search(self, name, prompt):
        self.ask(name, prompt, beam_width=3, n=2, temperature=0)

    def run(self):
        while self.loop.busy:
            self.deltas += self.loop.step()
        self.scheduler.check_idle()
        return self

    def outputs(self, name):
        found = {}
        for delta in self.deltas:
            if delta.id == name:
                found.setdefault(delta.index, []).extend(delta.tokens)
        return found

    def ends(self):
        return {(delta.id, delta.index): delta for delta in self.deltas if delta.finish is not None}


PROMPTS = {"search": [1, 2, 3, 4, 5, 6], "other": [7] * 9}


def searched(device, depth):
    engine = Engine(device, depth)
    engine.search("search", PROMPTS["search"])
    engine.ask("other", PROMPTS["other"])
    return engine.run()


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("at", range(9))
def test_a_search_survives_a_fault_that_passes(at, depth):
    undisturbed = searched(Reporting(64, BLOCK), depth)
    engine = searched(Reporting(64, BLOCK, fail_at=[at]), depth)
    assert engine.outputs("search") == undisturbed.outputs("search")
    assert sorted(engine.outputs("search")) == [0, 1]
    assert engine.outputs("other") == {0: toy_generate(PROMPTS["other"], 8, stop_ids=())}
    assert {end.finish for end in engine.ends().values()} == {FinishReason.LENGTH}


@pytest.mark.parametrize("depth", [0, 1])
def test_a_search_that_can_not_be_computed_ends_whole_and_alone(depth):
    engine = Engine(Reporting(64, BLOCK, poison=99), depth)
    engine.search("search", [1, 2, 99])
    engine.ask("other", PROMPTS["other"])
    ends = engine.run().ends()
    assert sorted(ends) == [("other", 0), ("search", 0), ("search", 1)]
    for index in (0, 1):
        assert ends["search", index].finish is FinishReason.ERROR
        assert "can't compute token 99" in ends["search", index].error
    assert engine.outputs("other") == {0: toy_generate(PROMPTS["other"], 8, stop_ids=())}


@pytest.mark.parametrize("depth", [0, 1])
def test_a_search_whose_arithmetic_fails_ends_whole_and_keeps_nobody_waiting(depth, monkeypatch, caplog):
    rounds = iter(range(100))

    def step(search, outputs, found, step=BeamSearch.step):
        if next(rounds) == 2:
            raise OverflowError("a power beyond all floats")
        return step(search, outputs, found)

    monkeypatch.setattr(BeamSearch, "step", step)
    engine = searched(Reporting(64, BLOCK), depth)
    ends = engine.ends()
    assert sorted(ends) == [("other", 0), ("search", 0), ("search", 1)]
    for index in (0, 1):
        assert ends["search", index].error == "Internal error: OverflowError: a power beyond all floats"
    assert engine.outputs("other") == {0: toy_generate(PROMPTS["other"], 8, stop_ids=())}
    assert "a row of request search could not be taken in" in caplog.text


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("at", range(12))
@pytest.mark.parametrize("place", [(Beams, "report"), (BeamGroup, "advance"), (KVCache, "fork"), (KVCache, "release")])
def test_a_search_whose_books_fail_ends_whole_and_leaves_nothing_behind(place, at, depth, monkeypatch):
    """Where the fault comes, if it comes at all, half of the beams may have got their new blocks, or their ends."""
    undisturbed = searched(Reporting(64, BLOCK), depth)
    owner, name = place
    calls, call = iter(range(1000)), getattr(owner, name)

    def faulty(*args):
        found = call(*args)
        if next(calls) == at:
            raise KeyError(name)
        return found

    monkeypatch.setattr(owner, name, faulty)
    engine = searched(Reporting(64, BLOCK), depth)
    ends = engine.ends()
    assert sorted(ends) == [("other", 0), ("search", 0), ("search", 1)]
    for asked in ("search", "other"):
        if all(ends[key].finish is FinishReason.LENGTH for key in ends if key[0] == asked):
            assert engine.outputs(asked) == undisturbed.outputs(asked)
    assert len({key[0] for key, end in ends.items() if end.finish is FinishReason.ERROR}) <= 1


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("at", [1, 4, 8])
def test_an_ending_that_can_not_be_worked_out_ends_that_request_alone(at, depth, monkeypatch, caplog):
    """At its first, a later or its last token, with steps in flight behind it."""

    def repeats(tokens, rule, start):
        if len(tokens) - start == at:
            raise KeyError("a pattern")
        return False

    monkeypatch.setattr(endings, "repeats", repeats)
    engine = Engine(ToyDevice(64, BLOCK), depth)
    engine.ask("a", [1] * 5)
    engine.ask("guilty", [2] * 5, repetition_detection=RepetitionDetection(max_pattern_size=3, min_count=2))
    engine.ask("b", [3] * 5)
    ends = engine.run().ends()
    assert ends["guilty", 0].finish is FinishReason.ERROR
    assert ends["guilty", 0].error == "Internal error: KeyError: 'a pattern'"
    assert engine.outputs("guilty") == {0: toy_generate([2] * 5, at - 1, stop_ids=())}
    assert ends["a", 0].num_preemptions == ends["b", 0].num_preemptions == 0
    assert engine.outputs("a") == {0: toy_generate([1] * 5, 8, stop_ids=())}
    assert engine.outputs("b") == {0: toy_generate([3] * 5, 8, stop_ids=())}
    assert "a row of request guilty could not be taken in" in caplog.text


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_what_fails_while_a_row_is_made_for_a_request_ends_it_alone_however_often(depth, monkeypatch):
    def share(room, request, prompts, share=Room.share):
        if request.id == "guilty":
            raise KeyError("a leader")
        return share(room, request, prompts)

    monkeypatch.setattr(Room, "share", share)
    engine = Engine(ToyDevice(64, BLOCK), depth)
    for name in ("a", "guilty", "b"):
        engine.ask(name, [ord(name[0])] * 5)
    ends = engine.run().ends()
    assert ends["guilty", 0].error == "Internal error: KeyError: 'a leader'"
    for name in ("a", "b"):
        assert engine.outputs(name) == {0: toy_generate([ord(name)] * 5, 8, stop_ids=())}


class Broken(EngineHook):
    """Fails on the admission of "guilty", on its third token, or on forgetting it."""

    name = "broken"

    def __init__(self, where):
        self.where = where
        self.forgotten = []

    def admit(self, request, num_tokens):
        if self.where == "admit" and request.id == "guilty":
            raise KeyError("an option that is not there")
        return num_tokens

    def on_commit(self, request, tokens):
        if self.where == "commit" and request.id == "guilty" and request.num_output == 3:
            raise KeyError("a state that is not there")
        return False

    def on_release(self, request):
        self.forgotten.append(request.id)
        if self.where == "release" and request.id == "guilty":
            raise KeyError("nothing to forget")


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_feature_that_fails_on_a_token_ends_that_request_alone(depth, caplog):
    hook, after = Broken("commit"), Broken("never")
    engine = Engine(ToyDevice(64, BLOCK), depth, [hook, after])
    for name in ("a", "guilty", "b"):
        engine.ask(name, [ord(name[0])] * 5)
    ends = engine.run().ends()
    assert ends["guilty", 0].finish is FinishReason.ERROR
    assert ends["guilty", 0].error == "Internal error: KeyError: 'a state that is not there'"
    assert engine.outputs("guilty") == {0: toy_generate([ord("g")] * 5, 3, stop_ids=())}
    for name in ("a", "b"):
        assert engine.outputs(name) == {0: toy_generate([ord(name)] * 5, 8, stop_ids=())}
    assert sorted(hook.forgotten) == sorted(after.forgotten) == ["a", "b", "guilty"]
    assert "failed on a token of request guilty" in caplog.text


def test_a_feature_that_can_not_forget_harms_nobody(caplog):
    hook, after = Broken("release"), Broken("never")
    engine = Engine(ToyDevice(64, BLOCK), 1, [hook, after])
    for name in ("a", "guilty", "b"):
        engine.ask(name, [ord(name[0])] * 5)
    ends = engine.run().ends()
    assert {end.finish for end in ends.values()} == {FinishReason.LENGTH}
    assert sorted(after.forgotten) == ["a", "b", "guilty"]
    assert "failed to forget request guilty" in caplog.text


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("whole", [False, True])
def test_a_feature_that_fails_to_admit_a_request_ends_that_alone(whole, depth, caplog):
    """It shares blocks of one that ran before, and others wait behind it."""
    hook, after = Broken("admit"), Broken("never")
    engine = Engine(ToyDevice(64, BLOCK), depth, [hook, after], whole_prompts=whole)
    prompt = [7] * 13
    engine.ask("before", prompt, max_tokens=1)
    engine.run()
    for name in ("guilty", "a", "b"):
        engine.ask(name, prompt)
    ends = engine.run().ends()
    assert ends["guilty", 0].finish is FinishReason.ERROR
    assert ends["guilty", 0].error == "Internal error: KeyError: 'an option that is not there'"
    assert ends["guilty", 0].refused is None
    for name in ("a", "b"):
        assert engine.outputs(name) == {0: toy_generate(prompt, 8, stop_ids=())}
    assert ends["a", 0].num_preemptions == 0
    assert sorted(hook.forgotten) == sorted(after.forgotten) == ["a", "b", "before", "guilty"]
    assert "failed to admit request guilty" in caplog.text
