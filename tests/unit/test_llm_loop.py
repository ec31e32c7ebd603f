"""Several calls of one program on one engine loop: each gets all of its own news, whoever steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import pytest

from octavo.cache.cache import KVCache
from octavo.core.errors import InvalidRequestError
from octavo.core.output import FinishReason, TokenDelta
from octavo.core.params import SamplingParams
from octavo.core.request import GenerateRequest
from octavo.engine.loop import EngineLoop
from octavo.engine.toy import ToyDevice, toy_generate
from octavo.python_api.loop import SharedLoop
from octavo.schedule.hooks import EngineHook
from octavo.schedule.policy import make_policy
from octavo.schedule.request import Request
from octavo.schedule.scheduler import Limits, Scheduler

A, B = [3, 1, 4], [2, 7, 1, 8]


def request(name: str, prompt: list[int], max_tokens: int, **params: object) -> GenerateRequest:
    sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True, seed=0, **params)  # type: ignore[arg-type]
    return GenerateRequest(id=name, tokens=prompt, params=sampling)


def tokens(news: Iterator[TokenDelta]) -> list[int]:
    return [token for delta in news for token in delta.tokens]


@pytest.fixture
def loop() -> Iterator[EngineLoop]:
    limits = Limits(max_num_seqs=4, max_num_batched_tokens=16, max_model_len=64, max_ahead=2)
    made = EngineLoop(Scheduler(KVCache(32, 4), limits, make_policy("fcfs")), ToyDevice(32, 4), 1)
    yield made
    assert not made.busy
    made.check_idle()


def test_streams_may_be_read_in_turn(loop: EngineLoop) -> None:
    shared = SharedLoop(loop)
    one, two = shared.run([request("a", A, 6)]), shared.run([request("b", B, 9)])
    first = [token for pair in zip(one, two, strict=False) for token in pair[0].tokens]
    assert first == toy_generate(A, 6, stop_ids=())
    assert tokens(two) == toy_generate(B, 9, stop_ids=())[6:]


def test_a_call_within_a_stream_leaves_it_whole(loop: EngineLoop) -> None:
    shared = SharedLoop(loop)
    stream = shared.run([request("a", A, 12)])
    begun = next(stream).tokens
    assert tokens(shared.run([request("b", B, 5)])) == toy_generate(B, 5, stop_ids=())
    assert begun + tokens(stream) == toy_generate(A, 12, stop_ids=())


def test_a_closed_stream_ends_its_request_and_no_other(loop: EngineLoop) -> None:
    shared = SharedLoop(loop)
    closed, other = shared.run([request("a", A, 40)]), shared.run([request("b", B, 5)])
    next(closed), next(other)
    closed.close()
    tokens(other)
    assert shared.stats().generation_tokens < 20


def test_a_choice_ended_by_the_reader_is_told_of(loop: EngineLoop) -> None:
    shared = SharedLoop(loop)
    ends = {}
    for delta in shared.run([request("a", A, 9, n=2, temperature=1)]):
        if not ends and delta.index == 0:
            shared.abort("a", 0)
        if delta.finish is not None:
            ends[delta.index] = delta.finish
    assert ends == {0: FinishReason.ABORT, 1: FinishReason.LENGTH}


def test_one_that_can_not_fit_keeps_all_from_running(loop: EngineLoop) -> None:
    shared = SharedLoop(loop)
    with pytest.raises(InvalidRequestError, match="maximum context length"):
        next(shared.run([request("a", A, 5), request("b", B, 500)]))
    assert shared.stats().generation_tokens == 0


def test_milestones_come_with_the_first_token_and_with_the_end(loop: EngineLoop) -> None:
    news = list(SharedLoop(loop).run([request("a", A, 6)]))
    first, *between, last = news
    assert first.times is not None
    assert 0 < first.times.first_scheduled <= first.times.first_token
    assert first.times.finished == 0.0
    assert all(delta.times is None for delta in between)
    assert last.times is not None
    assert last.times.first_token == first.times.first_token <= last.times.finished


def test_a_call_of_a_feature_that_needs_steps_gets_its_result() -> None:
    class Waiter(EngineHook):
        name = "waiter"

        def __init__(self) -> None:
            self.count = 0
            self.result: Future[int] = Future()

        def call(self, method: str, args: Mapping[str, Any]) -> Any:
            return self.result if method == "after" else self.count

        def on_commit(self, request: Request, tokens: Sequence[int]) -> bool:
            self.count += 1
            if self.count == 3:
                self.result.set_result(self.count)
            return False

    limits = Limits(max_num_seqs=4, max_num_batched_tokens=16, max_model_len=64)
    scheduler = Scheduler(KVCache(32, 4), limits, make_policy("fcfs"), hooks=[Waiter()])
    shared = SharedLoop(EngineLoop(scheduler, ToyDevice(32, 4)))
    stream = shared.run([request("a", A, 5)])
    first = next(stream)
    assert shared.call("waiter", "after", {}) == 3
    assert shared.call("waiter", "now", {}) == 3
    assert first.tokens + tokens(stream) == toy_generate(A, 5, stop_ids=())
