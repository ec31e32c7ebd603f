"""Steps that fail under a beam search, which goes on as if nothing had been or ends as a whole."""

from __future__ import annotations

import random
from collections.abc import Sequence

import msgspec
import pytest
from steps_kit import BLOCK, Engine
from tier_kit import Shelf, ShelfMover

from octavo.cache.cache import KVCache
from octavo.core.cache_groups import FULL
from octavo.core.output import FinishReason, TokenLogprobs
from octavo.engine.toy import VOCAB, ToyDevice, toy_generate
from octavo.features.beams.engine import Beams, BeamsEngine
from octavo.features.beams.search import BeamSearch
from octavo.schedule.siblings import Siblings


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


def search(engine: Engine, name: str, prompt: Sequence[int]) -> None:
    option = msgspec.Raw(msgspec.msgpack.encode(Beams(3)))
    engine.ask(name, prompt, {"beams": option}, n=2, temperature=1)


PROMPTS = {"search": [1, 2, 3, 4, 5, 6], "other": [7] * 9}


def searched(device, depth, *hooks):
    engine = Engine(device, depth, [BeamsEngine(), *hooks])
    search(engine, "search", PROMPTS["search"])
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
    engine = Engine(Reporting(64, BLOCK, poison=99), depth, [BeamsEngine()])
    search(engine, "search", [1, 2, 99])
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
    assert "failed to process the output of request search" in caplog.text


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("at", range(12))
@pytest.mark.parametrize(
    "place", [(Siblings, "report"), (Siblings, "_advance"), (KVCache, "fork"), (KVCache, "release")]
)
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


def test_no_reserve_is_held_against_a_search() -> None:
    """Its beams wait for each other: one that waited for the others to end would wait for ever."""
    undisturbed = searched(Reporting(64, BLOCK), 0)
    engine = Engine(Reporting(64, BLOCK), 0, [BeamsEngine()], watermark=1.0)
    search(engine, "search", PROMPTS["search"])
    assert engine.run().outputs("search") == undisturbed.outputs("search")


@pytest.mark.parametrize("depth", [0, 1])
def test_what_sequences_that_exchange_their_tokens_compute_is_kept_under_its_own_name(depth):
    """The mover compares the name of every page with what its cells stand for."""
    mover = ShelfMover(random.Random(0), FULL, latency=1.0)
    plain = searched(Reporting(64, BLOCK), depth)
    engine = searched(Reporting(64, BLOCK, mover=mover), depth, Shelf())
    assert engine.outputs("search") == plain.outputs("search")
    assert engine.loop.stats().blocks_stored > 2
