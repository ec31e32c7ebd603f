"""Drafts change how many steps it takes, and nothing else: tokens, log-probabilities and ends are those without them.

A tiny random model in float32; the truth is each request alone, without drafts, one step after the other, on the same
device: what is drawn depends on it.
"""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import pytest
from chi_square import chi_square
from msgspec import structs
from torch import Tensor
from toy_drafter import DrafterEngine, DrafterWorker, News, check_same, news_of, runner_of, with_drafter
from toy_engine import GPU, device_of, drive, one_by_one, strict, tiny_config, tokens_of
from toy_models import LLAMA, LLAMA_KV_BYTES_PER_TOKEN, VOCAB, model_files
from toy_recurrent import FAMILIES

from octavo.build import build_core
from octavo.core.output import FinishReason
from octavo.core.params import SamplingParams
from octavo.core.plan import StepPlan
from octavo.core.request import GenerateRequest
from octavo.engine.loop import EngineLoop
from octavo.sampling.allowed import Allowed
from octavo.schedule.request import Request
from octavo.worker.native_replay import NativeReplay
from octavo.worker.step import Step

FEATURES: dict[str, dict[str, Any]] = {
    "overlap": {"async_scheduling": True},
    "depth 2": {"depth": 2},
    "chunked prefill": {"max_num_batched_tokens": 24, "max_num_seqs": 6},
    "preemption": {"memory_bytes": 144 * LLAMA_KV_BYTES_PER_TOKEN, "max_model_len": 128},
    "no prefix cache": {"enable_prefix_caching": False},
    "small batches": {"max_num_seqs": 3},
    "torch attention": {"attention_backend": "torch"},
    "large blocks": {"block_size": 32},
}
PAIRS = [(), *((name,) for name in FEATURES), *itertools.combinations(FEATURES, 2)]
CONFLICTS = {frozenset({"overlap", "depth 2"}), frozenset({"chunked prefill", "small batches"})}

SAMPLED: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0.9, "top_k": 20, "top_p": 0.9, "seed": 1, "n": 2},
    {"temperature": 0, "repetition_penalty": 1.3, "frequency_penalty": 0.5, "logit_bias": {7: 1.5}, "logprobs": 2},
    {"temperature": 1.1, "seed": 4, "logprobs": 3, "presence_penalty": 0.4, "min_tokens": 9},
    {"temperature": 0, "prompt_logprobs": 2, "bad_token_ids": [[11], [40, 41]], "logprobs": 1},
    {"temperature": 0.7, "min_p": 0.05, "seed": 9, "stop_token_ids": [17, 30, 80, 101, 111, 120]},
]


def requests() -> list[GenerateRequest]:
    rng = random.Random(5)
    prefixes = [[rng.randrange(4, VOCAB) for _ in range(n)] for n in (48, 17)]
    made = []
    for i in range(12):
        prompt = rng.choice([*prefixes, []]) + [rng.randrange(4, VOCAB) for _ in range(rng.randrange(1, 40))]
        params = SamplingParams(max_tokens=rng.randrange(8, 60), **SAMPLED[i % len(SAMPLED)])
        made.append(GenerateRequest(id=f"r{i}", tokens=prompt, params=params, priority=i % 2))
    return made


def engine(config: dict[str, Any] = LLAMA, **settings: Any) -> EngineLoop:
    loop = build_core(tiny_config(**settings), model_files(config))[0]
    return strict(loop)


@cache
def truth(device: str) -> News:
    plain = {"attention_backend": "reference", "enable_prefix_caching": False, "async_scheduling": False}
    loop = engine(**plain, device=device)
    alone = news_of(list(one_by_one(loop, requests())))
    loop.close()
    return alone


@cache
def texts(device: str) -> list[list[int]]:
    """Each prompt with what follows it."""
    prompts = {request.id: request.tokens for request in requests()}
    return [prompts[name] + tokens for (name, _), (tokens, *_) in truth(device).items()]


@pytest.mark.parametrize("names", [p for p in PAIRS if frozenset(p) not in CONFLICTS], ids=lambda p: " + ".join(p))
def test_drafts_change_nothing(names: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    settings: dict[str, Any] = {}
    for name in names:
        settings |= FEATURES[name]
    device = device_of(settings)
    known, expected = texts(device), truth(device)
    drafter = DrafterEngine()
    with_drafter(monkeypatch, drafter, DrafterWorker(known, VOCAB))
    loop = engine(**settings)
    check_same(news_of(list(drive(loop, requests()))), expected)
    assert drafter.accepted > 50
    assert drafter.rejected > 50
    if "preemption" in names and "small batches" not in names:
        assert loop.stats().num_preemptions > 0
    loop.close()


class LateEngine(DrafterEngine):
    """Has a payload for sampling, which comes after a native program has drawn the tokens."""

    opt_in = False

    def before_sample(self, plan: StepPlan, rows: Sequence[Request]) -> Any:
        return [] if any(plan.num_drafts) else None


class LateWorker(DrafterWorker):
    rows = 0

    def apply(self, logits: Tensor, slots: Sequence[int], payload: Any) -> Mapping[int, str]:
        assert len(logits) == len(slots)
        self.rows += len(slots)
        return {}


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("names", [(), ("depth 2",), ("preemption",)], ids=lambda names: " + ".join(names))
def test_without_reports_a_replay_draws_and_verifies(
    names: tuple[str, ...], late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests with log-probabilities, which most steps above have, keep a step out of the CPU's replay.

    Where a hook changes logits later, what the replay has drawn is taken back.
    """
    settings: dict[str, Any] = {}
    for name in names:
        settings |= FEATURES[name]
    device = device_of(settings)
    silent = [
        structs.replace(one, params=structs.replace(one.params, logprobs=None, prompt_logprobs=None))
        for one in requests()
    ]
    drafter = LateEngine() if late else DrafterEngine()
    worker = (LateWorker if late else DrafterWorker)(texts(device), VOCAB)
    with_drafter(monkeypatch, drafter, worker)
    loop = engine(**settings)
    found = {key: (tokens, end) for key, (tokens, _, _, end) in news_of(list(drive(loop, silent))).items()}
    assert found == {key: (tokens, end) for key, (tokens, _, _, end) in truth(device).items()}
    assert drafter.accepted > 50
    assert drafter.rejected > 50
    assert runner_of(loop).replay.count > 20
    if isinstance(worker, LateWorker):
        assert worker.rows > 100
    loop.close()


@pytest.mark.parametrize("late", [False, True])
def test_a_replay_takes_recurrent_layers_back(late: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row with a rejected draft is computed again, in a native call of its own or together with others."""
    config = FAMILIES["BambaForCausalLM"] | {"architectures": ["BambaForCausalLM"], "model_type": "any"}
    config |= {"initializer_range": 0.3, "max_position_embeddings": 128}
    asked = [
        GenerateRequest(id=one.id, tokens=one.tokens, params=SamplingParams(max_tokens=30, top_k=1, ignore_eos=True))
        for one in requests()
    ]
    plain = engine(config, device="cpu", max_model_len=128, enable_prefix_caching=False, async_scheduling=False)
    expected = news_of(list(one_by_one(plain, asked)))
    plain.close()
    prompts = {one.id: one.tokens for one in asked}
    known = [prompts[name] + tokens for (name, _), (tokens, *_) in expected.items()]
    drafter = LateEngine() if late else DrafterEngine()
    with_drafter(monkeypatch, drafter, (LateWorker if late else DrafterWorker)(known, VOCAB))
    loop, replay = engine(config, device="cpu", max_model_len=128), NativeReplay.forward
    drafts: list[int] = []

    def counting(self: NativeReplay, step: Step, allowed: Allowed | None) -> None:
        drafts.append(sum(step.plan.num_drafts))
        replay(self, step, allowed)

    monkeypatch.setattr(NativeReplay, "forward", counting)
    assert news_of(list(drive(loop, asked))) == expected
    assert drafter.accepted > 50
    assert drafter.rejected > 50
    assert sum(drafts) > 20, "in native calls"
    loop.close()


def test_the_truth_is_worth_comparing_with() -> None:
    """All ways to end occur, some in the middle of what is drafted, and reports have an entry a token."""
    ends = truth(device_of({})).values()
    assert {finish for *_, finish in ends} == {FinishReason.STOP, FinishReason.LENGTH}
    assert all(len(logprobs) in (0, len(tokens)) for tokens, logprobs, *_ in ends)
    assert sum(bool(logprobs) for _, logprobs, *_ in ends) > 4


WINDOWED = LLAMA | {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "num_hidden_layers": 3,
    "use_sliding_window": True,
    "sliding_window": 20,
    "max_window_layers": 1,
}


@pytest.mark.parametrize("backend", [None, "torch"])
@pytest.mark.parametrize("depth", [pytest.param(0, marks=pytest.mark.slow), 2])
def test_windows_keep_what_rejected_drafts_leave_to_compute(
    backend: str | None, depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks that leave a window are released by the oldest position that may still be computed again."""
    settings = {"attention_backend": backend, "max_model_len": 160, "max_num_seqs": 4, "max_num_batched_tokens": 48}

    def run() -> News:
        loop = engine(WINDOWED, depth=depth, **settings)
        news = news_of(list(drive(loop, requests())))
        loop.close()
        return news

    expected = run()
    prompts = {request.id: request.tokens for request in requests()}
    drafter = DrafterEngine()
    known = [prompts[name] + tokens for (name, _), (tokens, *_) in expected.items()]
    with_drafter(monkeypatch, drafter, DrafterWorker(known, VOCAB))
    check_same(run(), expected)
    assert drafter.accepted > 50
    assert drafter.rejected > 50


@pytest.mark.parametrize("right", [1.0, 0.0], ids=["all right", "all wrong"])
def test_steps_are_saved_by_drafts_that_are_right(right: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request of 60 tokens and 7 drafts a step."""
    asked = GenerateRequest(
        id="r", tokens=[5, 6, 7, 8], params=SamplingParams(max_tokens=60, temperature=0, ignore_eos=True)
    )
    plain = engine()
    before = plain.stats().num_steps
    tokens = tokens_of(drive(plain, [asked]))["r", 0]
    assert plain.stats().num_steps - before == 60
    drafter = DrafterEngine()
    drafter.drafts = lambda request: None  # type: ignore[method-assign]
    worker = DrafterWorker([asked.tokens + tokens] if right else [], VOCAB if right else 1, right=1.0)
    monkeypatch.setattr(worker._random, "random", lambda: 0.5)
    with_drafter(monkeypatch, drafter, worker)
    loop = engine()
    before = loop.stats().num_steps
    assert tokens_of(drive(loop, [asked]))["r", 0] == tokens
    steps = loop.stats().num_steps - before
    assert steps == (9 if right else 60 - drafter.accepted)


def test_who_may_draft_but_does_not_leaves_steps_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plans are those without the feature, and what is replayed stays so.

    A native replay takes steps with drafts, but none that has a new request; the graphs of a GPU take new requests,
    and small steps with drafts.
    """
    params = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)
    asked = [GenerateRequest(id=f"r{i}", tokens=[5 + i, 9], params=params) for i in range(3)]

    worker = DrafterWorker(vocab=VOCAB)

    def run() -> tuple[dict[tuple[str, int], list[int]], list[Any], int]:
        loop = engine()
        worker.asked = 0  # a GPU's warm-up asks
        runner = runner_of(loop)
        plans, forward = [], runner.forward

        def noting(plan: Any) -> Any:
            plans.append(plan)
            return forward(plan)

        monkeypatch.setattr(runner, "forward", noting)
        before = runner.replay.count
        tokens = tokens_of(drive(loop, asked))
        replayed = runner.replay.count - before
        loop.close()
        return tokens, plans, replayed

    expected, plans, replayed = run()
    with_drafter(monkeypatch, DrafterEngine(0), worker)
    assert run() == (expected, plans, replayed)
    assert not worker.asked
    willing = DrafterEngine()
    willing.drafts = lambda request: 0  # type: ignore[method-assign]
    with_drafter(monkeypatch, willing, worker)
    assert run() == (expected, plans, replayed)
    assert not worker.asked
    if replayed:
        assert replayed >= 19
    with_drafter(monkeypatch, DrafterEngine(), worker)
    tokens, drafted, fewer = run()
    assert tokens == expected
    assert worker.asked
    if replayed:
        if GPU:
            assert fewer >= sum(not any(plan.num_drafts) for plan in drafted)
        else:
            assert fewer == sum(not plan.new for plan in drafted)


# The distribution of what is drawn

COUNT, LENGTH, TOP = 3000, 3, 6
SMALL = LLAMA | {"vocab_size": 32, "num_hidden_layers": 1, "max_position_embeddings": 64}
PROMPT = [5, 9, 2]
WARM: dict[str, Any] = {"temperature": 0.4, "top_k": TOP, "ignore_eos": True}


def small_engine() -> EngineLoop:
    settings = {"memory_bytes": 1 << 21, "logprobs_mode": "processed_logprobs"}
    if not GPU:
        settings["attention_backend"] = "torch"
    return build_core(tiny_config(max_num_seqs=64, **settings), model_files(SMALL))[0]


def tokens_drawn(asked: list[GenerateRequest]) -> News:
    loop = small_engine()
    news = news_of(list(drive(loop, asked, at_once=64)))
    loop.close()
    return news


@cache
def target() -> dict[tuple[int, ...], float]:
    """The probability of each output of LENGTH tokens, from the engine's own report of what it draws from."""
    known = {(): 1.0}
    for length in range(LENGTH):
        params = SamplingParams(max_tokens=1, seed=0, logprobs=TOP, **WARM)
        begun = {",".join(map(str, one)): one for one in known if len(one) == length}
        asked = [
            GenerateRequest(id=f"p{name}", tokens=PROMPT + list(one), params=params) for name, one in begun.items()
        ]
        for (name, _), (_, logprobs, *_) in tokens_drawn(asked).items():
            one, entry = begun[name[1:]], logprobs[0]
            for token, logprob in zip(entry.top_ids, entry.top_logprobs, strict=True):
                known[(*one, token)] = known[one] * math.exp(logprob)
    return {one: chance for one, chance in known.items() if len(one) == LENGTH}


def misfit(monkeypatch: pytest.MonkeyPatch) -> tuple[float, int]:
    """How far the outputs of requests with drafts are from the target: the statistic, and its degrees of freedom."""
    drafter = DrafterEngine(3)
    drafter.drafts = lambda request: None  # type: ignore[method-assign]
    chances = target()
    likely = [PROMPT + list(one) for one in sorted(chances, key=lambda one: -chances[one])]
    with_drafter(monkeypatch, drafter, DrafterWorker(likely, 32))
    asked = [
        GenerateRequest(id=str(i), tokens=PROMPT, params=SamplingParams(max_tokens=LENGTH, seed=i, **WARM))
        for i in range(COUNT)
    ]
    drawn = Counter(tuple(tokens) for tokens, *_ in tokens_drawn(asked).values())
    assert drafter.accepted > COUNT / 10
    outcomes = sorted(chances.keys() | drawn.keys())
    expected = [COUNT * chances.get(one, 0.0) for one in outcomes]
    return chi_square([drawn[one] for one in outcomes], expected), len(expected) - 1


def test_drawn_tokens_follow_the_target(monkeypatch: pytest.MonkeyPatch) -> None:
    statistic, freedom = misfit(monkeypatch)
    assert statistic < freedom + 5 * math.sqrt(2 * freedom)


def test_accepting_every_draft_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    module = "octavo.worker.resident.drafts" if GPU else "octavo.worker.slots"
    monkeypatch.setattr(f"{module}.verify", lambda drawn, drafts, counts, starts: 1 + counts)
    statistic, freedom = misfit(monkeypatch)
    assert statistic > freedom + 20 * math.sqrt(2 * freedom)
