"""Steps and features that fail: a feature's fault ends one request."""

from __future__ import annotations

import pytest
from steps_kit import BLOCK, Engine

from octavo.core.output import FinishReason
from octavo.core.params import RepetitionDetection
from octavo.engine.toy import ToyDevice, toy_generate
from octavo.schedule import outputs
from octavo.schedule.hooks import EngineHook
from octavo.schedule.kv_planner import KvPlanner


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("at", [1, 4, 8])
def test_an_ending_that_can_not_be_worked_out_ends_that_request_alone(at, depth, monkeypatch, caplog):
    """At its first, a later or its last token, with steps in flight behind it."""

    def repeats(tokens, rule, start):
        if len(tokens) - start == at:
            raise KeyError("a pattern")
        return False

    monkeypatch.setattr(outputs, "repeats", repeats)
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
    assert "failed to process the output of request guilty" in caplog.text


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_what_fails_while_a_row_is_made_for_a_request_ends_it_alone_however_often(depth, monkeypatch):
    def share(room, request, prompts, share=KvPlanner.share):
        if request.id == "guilty":
            raise KeyError("a leader")
        return share(room, request, prompts)

    monkeypatch.setattr(KvPlanner, "share", share)
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
    assert "failed to release request guilty" in caplog.text


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
