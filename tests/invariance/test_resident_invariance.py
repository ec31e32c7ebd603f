"""The runner whose state lives on the device gives the CPU's tokens, however the steps are cut: depth, chunks, blocks.

Without a GPU the kernels run in Triton's interpreter, on few and short requests.
"""

from __future__ import annotations

import os
import random
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from torch import Tensor
from toy_engine import drive, tiny_config
from toy_engine import tokens_of as engine_tokens
from toy_graphs import recorded_graphs
from toy_models import QWEN3, VOCAB, behind, model_files

from octavo.build import build_core
from octavo.core.output import TokenDelta, TokenLogprobs
from octavo.core.params import SamplingParams
from octavo.core.request import GenerateRequest
from octavo.sampling.allowed import Allowed, words_of
from octavo.schedule.hooks import EngineHook
from octavo.schedule.request import Request
from octavo.worker.hooks import WorkerHook
from octavo.worker.resident.batches import token_counts
from octavo.worker.resident.row_counts import MAX_ROWS, sizes
from octavo.worker.resident.sharing import Groups

GPU = torch.cuda.is_available()
COUNT = 40 if GPU else 4
HEAD, TAIL = (33, 30) if GPU else (17, 12)
"""Tokens of the prompts' common beginning, and one more than they have of their own at most."""

FEATURES: dict[str, dict[str, Any]] = {
    "overlap": {},
    "no overlap": {"async_scheduling": False},
    "chunked prefill": {"max_num_batched_tokens": 12, "max_num_seqs": 8},
    "no prefix cache": {"enable_prefix_caching": False},
    "small batches": {"max_num_seqs": 2},
    "preemption": {"policy": "priority", "max_num_seqs": 2},
} | ({"eager": {"enforce_eager": True}} if GPU else {})


def requests() -> list[GenerateRequest]:
    rng = random.Random(5)
    head = [rng.randrange(4, VOCAB) for _ in range(HEAD)]
    made = []
    for i in range(COUNT):
        prompt = (head if i % 2 else []) + [rng.randrange(4, VOCAB) for _ in range(rng.randrange(1, TAIL))]
        sampled: dict[str, Any] = {"temperature": 0}
        if i % 3 == 1:
            sampled = {"temperature": 0, "repetition_penalty": 1.3, "frequency_penalty": 0.5, "logit_bias": {7: 1.5}}
        if i % 5 == 3:
            sampled = {"temperature": 0, "logprobs": 2}
        params = SamplingParams(max_tokens=rng.randrange(4, 60 if GPU else 7), min_tokens=3, **sampled)
        made.append(GenerateRequest(id=f"r{i}", tokens=prompt, params=params, priority=-i))
    return made


def drawn() -> list[GenerateRequest]:
    """Sampled ones, whose tokens are this runner's own."""
    settings = [
        {"temperature": 0.9},
        {"temperature": 1.2, "top_k": 20, "top_p": 0.9},
        {"temperature": 0.7, "min_p": 0.1},
    ]
    return [
        GenerateRequest(id=f"d{i}", tokens=[5 + i, 9, 11], params=SamplingParams(max_tokens=8, seed=i, **each))
        for i, each in enumerate(settings)
    ]


def run(asked: list[GenerateRequest], **settings: Any) -> dict[str, list[int]]:
    return tokens_of(deltas(asked, **settings))


def tokens_of(news: list[TokenDelta]) -> dict[str, list[int]]:
    tokens: dict[str, list[int]] = {}
    for delta in news:
        assert delta.error is None, delta.error
        tokens.setdefault(delta.id, []).extend(delta.tokens)
        if delta.logprobs is not None:
            assert all(len(entry.top_ids) == 2 for entry in delta.logprobs)
    return tokens


def deltas(asked: list[GenerateRequest], **settings: Any) -> list[TokenDelta]:
    loop, _ = build_core(tiny_config(**{"memory_bytes": 1 << 21, **settings}), model_files(QWEN3))
    news = list(drive(loop, asked))
    loop.close()
    return news


def resident(asked: list[GenerateRequest], monkeypatch: pytest.MonkeyPatch, **settings: Any) -> dict[str, list[int]]:
    return run(asked, **behind(monkeypatch), **settings)


@cache
def truth() -> dict[str, list[int]]:
    return run(requests(), device="cpu", attention_backend="torch")


@pytest.mark.parametrize("name", FEATURES)
def test_greedy_tokens_are_those_of_the_cpu(name, monkeypatch):
    expected = truth()
    news = deltas(requests(), **behind(monkeypatch), **FEATURES[name])
    assert tokens_of(news) == expected
    assert any(delta.num_preemptions for delta in news) == (name == "preemption")


def test_products_in_halves_are_added_by_the_norm_that_follows(monkeypatch):
    """Some are, some go to the stream themselves, so that each follows each."""
    came = []

    def halves(x: Tensor, weight: Tensor) -> Tensor | None:
        came.append(len(came) % 3 != 0)
        middle = x.shape[1] // 2
        parts = ((x[:, :middle], weight[:, :middle]), (x[:, middle:], weight[:, middle:]))
        return torch.stack([part @ matrix.t() for part, matrix in parts]) if came[-1] else None

    monkeypatch.setattr("octavo.nn.ops.products.halves", halves)
    asked = requests()[:4]
    expected = {request.id: truth()[request.id] for request in asked}
    assert resident(asked, monkeypatch, enforce_eager=True) == expected
    assert {True, False} == set(came)


@pytest.mark.parametrize("kind", ["fp8", pytest.param("fp8_e5m2", marks=pytest.mark.slow)])
def test_fp8_keys_and_values(kind, monkeypatch):
    """The same tokens whatever the depth and the batch; that they are the right ones is for tests/oracle/ to say.

    On a GPU sums are taken in an order that depends on the batch, and what lies between two numbers of FP8 may then
    go either way: now and then a request has other tokens.
    """
    monkeypatch.setattr("octavo.worker.kv_scales.SCALING_TOKENS", 16)
    settings = {"kv_cache_dtype": kind, "enable_prefix_caching": False}
    asked = requests()[: 20 if GPU else 2]
    together = resident(asked, monkeypatch, **settings)
    assert all(together[request.id] for request in asked)
    alone = resident(asked, monkeypatch, **settings, async_scheduling=False, max_num_seqs=1)
    differing = [name for name in together if together[name] != alone[name]]
    assert len(differing) <= (2 if GPU else 0)


def test_drawn_tokens_depend_on_the_request_alone(monkeypatch):
    together = resident(drawn(), monkeypatch)
    alone: dict[str, list[int]] = {}
    for request in drawn()[:2]:
        alone |= resident([request], monkeypatch, async_scheduling=False)
    assert {name: together[name] for name in alone} == alone
    assert len({tuple(tokens) for tokens in together.values()}) == 3


class Odd(EngineHook):
    """For requests named so, only odd tokens; for those named to fail, an error at the third token."""

    name = "odd"

    def __init__(self) -> None:
        self._failing = 0

    def before_sample(self, plan: Any, rows: Sequence[Request]) -> dict[int, str] | None:
        wanted = {}
        for slot, samples, request in zip(plan.slots, plan.samples, rows, strict=True):
            if samples and request.spec.id in ("odd", "fail"):
                self._failing += request.spec.id == "fail"
                ended = request.spec.id == "fail" and self._failing >= 3
                wanted[slot] = "Its third token failed." if ended else ""
        return wanted or None


class OddWorker(WorkerHook):
    name = "odd"

    def apply(self, logits: Tensor, slots: Sequence[int], payload: dict[int, str]) -> Mapping[int, str]:
        rows = [slots.index(slot) for slot in payload]
        for row in rows:
            logits[row, ::2] = float("-inf")
        return {row: payload[slots[row]] for row in rows if payload[slots[row]]}


class Forbidding(WorkerHook):
    """The same by a mask."""

    name = "odd"

    def allowed(self, slots: Sequence[int], payload: dict[int, str]) -> Allowed:
        rows = [slots.index(slot) for slot in payload]
        words = np.stack([words_of(range(1, VOCAB, 2), VOCAB)] * len(rows))
        return Allowed(rows, words, {row: payload[slots[row]] for row in rows if payload[slots[row]]})


class Following(OddWorker):
    """Takes part in every step."""

    laid_out = told = 0

    def lay_out(self, plan: Any, payload: Any) -> None:
        type(self).laid_out += 1

    def after_sample(self, plan: Any, output: Any) -> None:
        type(self).told += 1


def special() -> list[GenerateRequest]:
    """All that changes or reports on logits beside the sampling parameters of `requests`."""
    settings: dict[str, dict[str, Any]] = {
        "plain": {},
        "odd": {},
        "fail": {},
        "allowed": {"allowed_token_ids": [7, 9, 30, 31, 77], "bad_token_ids": [[30]]},
        "bad": {"bad_token_ids": BAD},
        "prompt": {"prompt_logprobs": 3},
        "all": {"prompt_logprobs": -1, "allowed_token_ids": [40, 41, 42, 43], "logprobs": 1, "frequency_penalty": 1.0},
    }
    rng = random.Random(8)
    return [
        GenerateRequest(
            id=name,
            tokens=[rng.randrange(4, VOCAB) for _ in range(20)],
            params=SamplingParams(max_tokens=6, min_tokens=6, temperature=0, **each),
        )
        for name, each in settings.items()
    ]


BAD = [[1, VOCAB + 5], [5]]


def summary(
    news: list[TokenDelta],
) -> dict[str, tuple[list[int], str | None, list[TokenLogprobs], list[TokenLogprobs]]]:
    """Request -> tokens, error, their log-probabilities, and its prompt's."""
    found: dict[str, tuple[list[int], str | None, list[TokenLogprobs], list[TokenLogprobs]]] = {}
    for delta in news:
        tokens, error, logprobs, prompt = found.get(delta.id, ([], None, [], []))
        found[delta.id] = (
            tokens + delta.tokens,
            delta.error or error,
            logprobs + (delta.logprobs or []),
            prompt + (delta.prompt_logprobs or []),
        )
    return found


def check_close(found: list[TokenLogprobs], expected: list[TokenLogprobs]) -> None:
    assert [(entry.rank, entry.top_ids) for entry in found] == [(entry.rank, entry.top_ids) for entry in expected]
    for one, other in zip(found, expected, strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
        assert one.top_logprobs == pytest.approx(other.top_logprobs, abs=1e-4)


def with_feature(monkeypatch: pytest.MonkeyPatch, worker: WorkerHook) -> None:
    monkeypatch.setattr("octavo.build.build_engine_halves", lambda _: [Odd()])
    monkeypatch.setattr("octavo.build_worker.build_worker_halves", lambda _: [worker])


@pytest.mark.parametrize(
    ("name", "worker"),
    [
        ("overlap", OddWorker()),
        pytest.param("chunked prefill", OddWorker(), marks=pytest.mark.slow),
        pytest.param("no overlap", OddWorker(), marks=pytest.mark.slow),
        ("overlap", Forbidding()),
    ],
    ids=["overlap", "chunked prefill", "no overlap", "by a mask"],
)
def test_bans_features_and_reports_are_those_of_the_cpu(name, worker, monkeypatch):
    with_feature(monkeypatch, OddWorker())
    free = summary(deltas(special()[4:5], device="cpu", attention_backend="torch"))["bad"][0]
    across = [special()[4].tokens[-1], free[0]]  # begins in the prompt, so it may come
    monkeypatch.setattr(f"{__name__}.BAD", [across, free[0:2], [9, 9, *free[1:3]], free[2:5], free[5:6], [3, VOCAB]])
    expected = summary(deltas(special(), device="cpu", attention_backend="torch"))
    assert expected["bad"][0][0] == free[0]
    assert expected["bad"][0][1] != free[1]
    assert set(expected["allowed"][0]) <= {7, 9, 31, 77}
    assert all(token % 2 for token in expected["odd"][0])
    assert expected["fail"][1] == "Its third token failed."
    assert len(expected["prompt"][3]) == len(expected["all"][3]) == 19
    with_feature(monkeypatch, worker)
    found = summary(deltas(special(), **behind(monkeypatch), **FEATURES[name]))
    assert {key: each[:2] for key, each in found.items()} == {key: each[:2] for key, each in expected.items()}
    for key in expected:
        check_close(found[key][2], expected[key][2])
        check_close(found[key][3], expected[key][3])


@pytest.mark.parametrize(("tokens", "prompts"), [(34, 1), pytest.param(70, 16, marks=pytest.mark.slow)])
def test_recorded_steps_with_prompts(tokens, prompts, monkeypatch):
    """Prompts alone and beside decoding, in chunks and whole; a step with more of them than foreseen is launched."""
    expected = truth()
    monkeypatch.setattr("octavo.worker.resident.batches._MAX_PROMPTS", prompts)
    replayed = recorded_graphs(monkeypatch)
    settings = {"max_num_batched_tokens": tokens, "max_num_seqs": 5}
    assert run(requests(), **behind(monkeypatch), **settings) == expected
    assert replayed["mixed"]
    assert replayed["sample"] > 1


@pytest.mark.slow
def test_layers_with_windows_have_tables_of_their_own(monkeypatch):
    """Recorded and launched, with a context that is read once in the layers of full attention."""
    config = QWEN3 | {"num_hidden_layers": 2, "use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}
    rng = random.Random(6)
    head = [rng.randrange(4, VOCAB) for _ in range(75)]
    params = SamplingParams(max_tokens=7, temperature=0, ignore_eos=True)
    asked = [GenerateRequest(id=f"r{i}", tokens=[*head, 5 + i], params=params) for i in range(2)]

    def tokens(**settings: Any) -> dict[tuple[str, int], list[int]]:
        loop, info = build_core(tiny_config(memory_bytes=1 << 21, max_num_seqs=8, **settings), model_files(config))
        assert info.kv_groups == 2
        found = engine_tokens(drive(loop, asked, at_once=1))
        loop.close()
        return found

    expected = tokens(device="cpu", attention_backend="torch")
    monkeypatch.setattr("octavo.worker.resident.replay._WORTH", 1)
    monkeypatch.setattr("octavo.worker.resident.replay._WORTH_OF_PADDING", 0)
    replayed = recorded_graphs(monkeypatch)
    assert tokens(**behind(monkeypatch), max_num_batched_tokens=48) == expected
    assert replayed["sharing"]
    assert replayed["mixed"]


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{"max_num_seqs": 8}, {"async_scheduling": False}][: None if GPU else 1], ids=str)
def test_what_contexts_have_in_common_is_read_once(settings, monkeypatch):
    """Requests come and go in turn, so that groups grow and shrink; some have nothing in common with others."""
    rng = random.Random(os.urandom(8))
    heads = [[rng.randrange(4, VOCAB) for _ in range(count)] for count in ((70, 135, 0) if GPU else (70, 0))]
    asked = [
        GenerateRequest(
            id=f"r{i}",
            tokens=heads[i % len(heads)] + [rng.randrange(4, VOCAB) for _ in range(rng.randrange(1, 9))],
            params=SamplingParams(max_tokens=rng.randrange(4, 7), min_tokens=3, temperature=0),
        )
        for i in range(30 if GPU else 5)
    ]
    expected = run(asked, device="cpu", attention_backend="torch")
    sent: list[int] = []
    padded = Groups.padded
    monkeypatch.setattr(Groups, "padded", lambda self, *how: sent.append(self.saved) or padded(self, *how))
    monkeypatch.setattr("octavo.worker.resident.replay._WORTH", 1)
    monkeypatch.setattr("octavo.worker.resident.replay._WORTH_OF_PADDING", 0)
    replayed = recorded_graphs(monkeypatch)
    assert resident(asked, monkeypatch, **settings) == expected
    assert any(sent)
    assert replayed["sharing"]


@pytest.mark.slow
def test_reading_once_can_be_turned_off(monkeypatch):
    head = list(range(4, 72))
    asked = [
        GenerateRequest(id=f"r{i}", tokens=[*head, 80 + i], params=SamplingParams(max_tokens=3, temperature=0))
        for i in range(2)
    ]
    monkeypatch.setattr("octavo.worker.resident.replay._WORTH", 1)
    monkeypatch.setattr("octavo.worker.resident.replay._WORTH_OF_PADDING", 0)
    replayed = recorded_graphs(monkeypatch)
    resident(asked, monkeypatch, max_num_seqs=8, disable_cascade_attn=True)
    assert replayed["forward"]
    assert not replayed["sharing"]


def test_numbers_of_tokens_that_are_recorded_can_be_drawn_for():
    """Each is a batch size of decoding, or above all of them."""
    for rows in range(1, MAX_ROWS + 1):
        drawn_for = sizes(rows)
        assert all(count in drawn_for or count >= drawn_for[-1] for count in token_counts(8192))
    assert token_counts(100) == [16, 32, 64]


@pytest.mark.slow
@pytest.mark.parametrize("worker", [OddWorker(), Following(), Forbidding()], ids=lambda worker: type(worker).__name__)
def test_a_feature_leaves_the_graphs(worker, monkeypatch):
    """Steps with changed logits replay the forward pass; all others, and those with masks, the sampling too."""
    Following.laid_out = Following.told = 0
    with_feature(monkeypatch, worker)
    lengths = {"plain": 14, "odd": 5, "fail": 5}
    asked = [
        GenerateRequest(id=name, tokens=[8, 9, 10], params=SamplingParams(max_tokens=length, temperature=0))
        for name, length in lengths.items()
    ]
    expected = summary(deltas(asked, device="cpu", attention_backend="torch", max_num_seqs=4))
    replayed = recorded_graphs(monkeypatch)
    found = summary(deltas(asked, **behind(monkeypatch), max_num_seqs=4))
    assert {key: each[:2] for key, each in found.items()} == {key: each[:2] for key, each in expected.items()}
    if isinstance(worker, Forbidding):
        assert replayed["forward"] + replayed["mixed"] == replayed["sample"] > 10
    else:
        assert replayed["forward"] > replayed["sample"] > 3
    assert replayed["mixed"]
    if isinstance(worker, Following):
        assert Following.laid_out == Following.told > 10
