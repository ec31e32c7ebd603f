"""Steps of one token a row, computed by a single native call on a CPU, give the tokens that the general path gives."""

from __future__ import annotations

import random

import msgspec
import numpy as np
import pytest
from torch import Tensor
from toy_engine import drive, tiny_config, tokens_of
from toy_models import LLAMA, VOCAB, model_files

from octavo.build import build_core
from octavo.core.params import SamplingParams
from octavo.core.request import GenerateRequest
from octavo.engine.loop import EngineLoop
from octavo.native.build import NativeBuildError, load_library
from octavo.sampling.allowed import Allowed, words_of
from octavo.schedule.hooks import EngineHook
from octavo.worker.hooks import Hooks, WorkerHook
from octavo.worker.native_replay import NativeReplay
from octavo.worker.parts import NoReplay
from octavo.worker.runner import Runner


class Moody(EngineHook):
    """Has a say in the tokens of some steps, known only when their forward pass was launched."""

    name = "moody"
    opt_in = True

    def before_sample(self, plan, rows):
        return plan.id if plan.id % 5 == 2 else None


class NoSevens(WorkerHook):
    name = "moody"

    def apply(self, logits: Tensor, slots, payload):
        logits[:, payload % VOCAB :: 7] = float("-inf")
        return {}


class Strict(EngineHook):
    """Knows what it forbids when the step is planned."""

    name = "strict"
    opt_in = True

    def on_plan(self, draft, rows):
        draft.payload[self.name] = sum(len(row.tokens) + row.pending for row in rows)


class OnlySome(WorkerHook):
    name = "strict"

    def allowed(self, slots, payload):
        rows = [row for row, slot in enumerate(slots) if (slot + payload) % 3]
        tokens = [token for token in range(VOCAB) if (token + payload) % 5]
        return Allowed(rows, np.stack([words_of(tokens, VOCAB)] * len(rows))) if rows else None


class Following(WorkerHook):
    """Takes part in every step, and leaves it as it is."""

    name = "moody"

    def __init__(self):
        self.laid_out, self.told = [], []

    def lay_out(self, plan, payload):
        self.laid_out.append(plan.id)

    def after_sample(self, plan, output):
        self.told.append(plan.id)


HOOKS = {"alone": [], "late": [(Moody, NoSevens)], "masks": [(Strict, OnlySome)]}
HOOKS["both"] = HOOKS["late"] + HOOKS["masks"]


@pytest.fixture(scope="module", autouse=True)
def kernels():
    try:
        load_library()
    except NativeBuildError as error:
        pytest.skip(f"no kernels on this machine: {error}")


def engine(**settings: object) -> EngineLoop:
    chosen = {"threads": 2, "device": "cpu", **settings}
    return build_core(tiny_config(**chosen), model_files(LLAMA | {"tie_word_embeddings": True}))[0]


def requests(seed: int) -> list[GenerateRequest]:
    rng = random.Random(seed)
    made = []
    for i in range(9):
        prompt = [rng.randrange(4, VOCAB) for _ in range(rng.randrange(1, 40))]
        params = SamplingParams(
            max_tokens=4 if i == 7 else rng.randrange(1, 50), temperature=0, logprobs=1 if i == 7 else None
        )
        options = {"some feature": msgspec.Raw(b"\xc0")} if i % 4 == 3 else {}
        made.append(GenerateRequest(id=f"r{i}", tokens=prompt, params=params, options=options))
    return made


def runner_of(loop: EngineLoop) -> Runner:
    assert isinstance(loop._executor, Runner)
    return loop._executor


@pytest.mark.parametrize("hooked", HOOKS)
@pytest.mark.parametrize("overlap", [False, True], ids=["depth 0", "depth 1"])
def test_one_call_a_step_changes_no_token(overlap, hooked):
    taken = 0

    def results(quick: bool) -> dict[tuple[str, int], list[int]]:
        nonlocal taken
        loop = engine(async_scheduling=overlap)
        runner = runner_of(loop)
        assert isinstance(runner.replay, NativeReplay)
        loop._scheduler._hooks.extend(one() for one, _ in HOOKS[hooked])
        runner.hooks = Hooks([*runner.hooks._hooks, *(other() for _, other in HOOKS[hooked])])
        if not quick:
            runner.replay = NoReplay()
        tokens = tokens_of(drive(loop, requests(seed), at_once=1))
        taken += runner.replay.count
        return tokens

    seed = random.randrange(2**32)
    print("seed", seed)
    assert results(quick=True) == results(quick=False)
    assert taken > 5


def test_a_feature_that_follows_every_step_leaves_them_native():
    loop = engine()
    runner, hook = runner_of(loop), Following()
    runner.hooks = Hooks([hook])
    replayed = runner.replay.count
    tokens = tokens_of(drive(loop, requests(5), at_once=1))
    assert all(tokens.values())
    assert hook.laid_out == hook.told
    assert len(hook.told) > runner.replay.count - replayed > len(hook.told) / 2


def test_a_row_without_usable_logits_ends_alone():
    loop = engine()
    params = SamplingParams(max_tokens=9, temperature=0, ignore_eos=True)
    for i in range(3):
        loop.add(GenerateRequest(id=f"r{i}", tokens=[5, 6 + i], params=params))
    loop.step()
    for layer in runner_of(loop)._model.attention_layers:
        layer.cache[loop._scheduler._requests.running[1].table.blocks[0]] = float("nan")
    errors = {delta.id: delta.error for delta in loop.step() if delta.error}
    assert list(errors) == ["r1"]
    assert "no usable logits" in errors["r1"]
    left = tokens_of(drive(loop, []))
    assert {name: len(tokens) for (name, _), tokens in left.items()} == {"r0": 7, "r2": 7}
