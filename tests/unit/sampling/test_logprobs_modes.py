"""What `logprobs` tell in each mode, on every way of sampling, against the plain sampler."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any, get_args

import msgspec
import numpy as np
import plain_sampler
import pytest
import torch
from torch import Tensor
from toy_models import LLAMA, QWEN3, VOCAB, behind, model_files

from octavo.build import build_core
from octavo.config import EngineConfig
from octavo.core.output import TokenDelta, TokenLogprobs
from octavo.core.params import LogprobsMode, SamplingParams
from octavo.core.plan import NewRow, StepPlan
from octavo.core.request import GenerateRequest
from octavo.native.build import NativeBuildError, load_library
from octavo.native.program import Pool
from octavo.worker.samplers import NativeSampler, TorchSampler
from octavo.worker.slots import HostSlots

MODES: tuple[LogprobsMode, ...] = get_args(LogprobsMode)
SIZE = 300
PROMPT, OUTPUT = [5, 6, 7], [7, 8, 8]
STOP = 11
NAMED = [250, 3, 90]
ASKING: list[dict[str, Any]] = [
    {"temperature": 0, "logprobs": -1},
    {"temperature": 0, "logprobs": -1, "repetition_penalty": 1.4, "presence_penalty": 0.5, "logit_bias": {9: 3.0}},
    {"temperature": 0.7, "logprobs": -1},
    {"temperature": 1.3, "logprobs": -1, "top_k": 40},
    {"temperature": 0.9, "logprobs": -1, "top_k": 30, "top_p": 0.8, "min_p": 0.02},
    {"temperature": 1.0},
    {"temperature": 2.0, "logprobs": -1, "top_p": 0.6, "frequency_penalty": 0.4, "min_tokens": 9},
    {"temperature": 1.0, "logprobs": -1, "allowed_token_ids": list(range(0, SIZE, 2)), "bad_token_ids": [[8, 20]]},
    {"temperature": 0.8, "top_k": 2, "logprob_token_ids": NAMED},
]
PARAMS = [SamplingParams(max_tokens=99, seed=i, **one) for i, one in enumerate(ASKING)]
Way = Callable[[LogprobsMode, Tensor], tuple[list[int], dict[int, TokenLogprobs]]]


def plan() -> StepPlan:
    """A step in which every slot has one of the requests."""
    count = len(PARAMS)
    new = [
        NewRow(i, [*PROMPT, *OUTPUT], len(PROMPT), params, i, [STOP], len(PROMPT) + len(OUTPUT) - 1, [[]])
        for i, params in enumerate(PARAMS)
    ]
    return StepPlan(0, new, list(range(count)), [1] * count, [0] * count, [True] * count, [], [])


def on_the_host(pool: Pool | None, mode: LogprobsMode, logits: Tensor) -> tuple[list[int], dict[int, TokenLogprobs]]:
    slots = HostSlots(len(PARAMS), 32, 32, SIZE, mode)
    slots.apply(plan())
    sampler = TorchSampler(slots) if pool is None else NativeSampler(slots, pool)
    result = sampler.choose(logits, plan().slots)
    return result.tokens.tolist(), result.logprobs


def on_a_device(mode: LogprobsMode, logits: Tensor) -> tuple[list[int], dict[int, TokenLogprobs]]:
    from octavo.sampling.resident import PendingTokens, ResidentSampler
    from octavo.worker.resident.slots import DeviceSlots

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    slots = DeviceSlots(len(PARAMS), 32, 32, SIZE, device, mode)
    slots.apply(plan())
    sampler = ResidentSampler(slots.table, SIZE)
    slots.mirror(plan())
    rows = slots.sample_rows(plan())
    places = torch.arange(len(PARAMS), dtype=torch.int32, device=device)
    tokens, logprobs = sampler.sample(logits.to(device), places, rows)
    return tokens.tolist(), PendingTokens(tokens, logprobs).logprobs_of()  # type: ignore[arg-type]


@pytest.fixture(params=["torch", "native", "resident"])
def way(request: pytest.FixtureRequest) -> Way:
    if request.param == "torch":
        return lambda mode, logits: on_the_host(None, mode, logits)
    if request.param == "resident":
        pytest.importorskip("triton")
        return on_a_device
    try:
        load_library()
    except NativeBuildError as error:
        pytest.skip(f"no kernels on this machine: {error}")
    pool = Pool(1)
    return lambda mode, logits: on_the_host(pool, mode, logits)


def expected(mode: LogprobsMode, logits: Tensor, params: SamplingParams) -> list[float]:
    values = logits.tolist()
    if mode.startswith("processed"):
        values = plain_sampler.processed(values, params, [STOP], PROMPT, OUTPUT)
        if not params.greedy:
            kept = {token for token, _ in plain_sampler.kept(values, params)}
            values = [x / params.temperature if i in kept else -math.inf for i, x in enumerate(values)]
    if mode.endswith("logprobs"):
        peak = max(values)
        total = peak + math.log(math.fsum(math.exp(x - peak) for x in values))
        values = [x - total for x in values]
    return values


@pytest.mark.parametrize("mode", MODES)
def test_what_is_told(way: Way, mode: LogprobsMode) -> None:
    logits = torch.from_numpy(np.random.default_rng(17).normal(0, 3, (len(PARAMS), SIZE))).float()
    raw = logits.clone()
    tokens, found = way(mode, logits)
    assert sorted(found) == [row for row, params in enumerate(PARAMS) if params.reports]
    for row, entry in found.items():
        values = expected(mode, raw[row], PARAMS[row])
        token = tokens[row]
        assert values[token] > -math.inf
        assert entry.logprob == pytest.approx(values[token], abs=1e-4), row
        assert entry.rank == 1 + sum(value > values[token] for value in values), row
        assert len(entry.top_ids) == (len(NAMED) if PARAMS[row].logprob_token_ids else SIZE)
        assert entry.top_logprobs == pytest.approx([values[i] for i in entry.top_ids], abs=1e-4), row
        if not PARAMS[row].logprob_token_ids:
            assert entry.top_logprobs == sorted(entry.top_logprobs, reverse=True)


@pytest.mark.features("beams")
@pytest.mark.parametrize("resident", [False, True], ids=["host", "device"])
def test_prompts_and_beams_keep_to_raw_logprobs(resident: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if resident:
        pytest.importorskip("triton")
    where = behind(monkeypatch) if resident else {"device": "cpu"}
    rng = random.Random(3)
    prompt = [rng.randrange(4, VOCAB) for _ in range(9)]

    def deltas(mode: LogprobsMode) -> list[TokenDelta]:
        settings = {"load_format": "dummy", "dtype": "float32", "memory_bytes": 1 << 21, "threads": 1, **where}
        loop, _ = build_core(EngineConfig.of(logprobs_mode=mode, **settings), model_files(QWEN3 if resident else LLAMA))
        told = SamplingParams(max_tokens=2, temperature=0, logprobs=1, prompt_logprobs=2, ignore_eos=True)
        beams = SamplingParams(max_tokens=3, n=2)
        option = msgspec.Raw(msgspec.msgpack.encode([2, 1.0]))
        loop.add(GenerateRequest(id="told", tokens=prompt, params=told))
        loop.add(GenerateRequest(id="beams", tokens=prompt, params=beams, options={"beams": option}))
        news: list[TokenDelta] = []
        while loop.busy:
            news += loop.step()
        loop.close()
        return sorted(news, key=lambda one: (one.id, one.index))

    plain, other = deltas("raw_logprobs"), deltas("processed_logits")
    assert [one.error for one in plain] == [None] * len(plain)
    assert [(one.tokens, one.found, one.prompt_logprobs) for one in plain] == [
        (one.tokens, one.found, one.prompt_logprobs) for one in other
    ]
    assert any(one.prompt_logprobs for one in plain)
    assert all(entry.logprob < 0 for one in plain for entry in one.logprobs or [])
    assert any(one.found is not None for one in plain)
    assert [entry.rank for one in plain for entry in one.logprobs or []] == [1, 1]
    differ = zip(plain, other, strict=True)
    assert all(one.logprobs != two.logprobs for one, two in differ if one.logprobs)
