"""A thinking budget on its way through the engine: counted, enforced, and without a trace where it is not needed."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest
import torch
from toy_tokenizers import byte_level

from octavo.cache.cache import KVCache
from octavo.core.output import StepOutput
from octavo.core.params import SamplingParams
from octavo.core.request import GenerateRequest
from octavo.engine.loop import EngineLoop
from octavo.features.thinking.budget import ThinkingBudget
from octavo.features.thinking.engine import ThinkingEngine, Watch
from octavo.features.thinking.worker import ThinkingWorker
from octavo.schedule.policy import make_policy
from octavo.schedule.scheduler import Limits, Scheduler
from octavo.text.tokenizers.tokenizer import Tokenizer

TOKENIZER = Tokenizer(byte_level(), named_tokens={"eos_token": "</s>"})
EOS = 2
VOCAB = TOKENIZER.vocab_size
X = TOKENIZER.encode("x", add_special_tokens=False)[0]


class Step:
    def __init__(self, plan: Any) -> None:
        self.plan = plan
        self.output: StepOutput | None = None

    def result(self) -> StepOutput:
        assert self.output is not None
        return self.output


class Device:
    """Says what its script says, unless the worker half leaves it no choice."""

    def __init__(self, says: str, asks_feedback: list[bool]) -> None:
        self.worker = ThinkingWorker("thinking")
        self.said: dict[int, int] = {}
        self.script = TOKENIZER.encode(says, add_special_tokens=False)
        self.feedback = asks_feedback

    def forward(self, plan: Any) -> Step:
        self.feedback.append(plan.needs_feedback)
        return Step(plan)

    def sample(self, step: Step, payload: dict[str, Any]) -> None:
        slots = [slot for slot, samples in zip(step.plan.slots, step.plan.samples, strict=True) if samples]
        logits = torch.zeros(len(slots), VOCAB)
        for row, slot in enumerate(slots):
            at = self.said.get(slot, 0)
            logits[row, self.script[at] if at < len(self.script) else X] = 1.0
            self.said[slot] = at + 1
        if payload:
            self.worker.apply(logits, slots, payload["thinking"])
        chosen = iter(logits.argmax(-1).tolist())
        step.output = StepOutput([[next(chosen)] if samples else [] for samples in step.plan.samples])

    def close(self) -> None:
        pass


def output(says: str, tokens: int, *, is_open: bool, depth: int, ahead: list[bool] | None = None) -> str:
    hook = ThinkingEngine("thinking", lambda: TOKENIZER)
    limits = Limits(max_num_seqs=4, max_num_batched_tokens=64, max_model_len=512, max_ahead=depth + 1)
    scheduler = Scheduler(KVCache(512, 4), limits, make_policy("fcfs"), eos_token_ids=[EOS], hooks=[hook])
    loop = EngineLoop(scheduler, Device(says, ahead if ahead is not None else []), depth)
    budget = ThinkingBudget(tokens=tokens, begin="<think>", end="</think>", open=is_open)
    option = {"thinking": msgspec.Raw(msgspec.msgpack.encode(budget))}
    params = SamplingParams(max_tokens=60, temperature=0)
    loop.add(GenerateRequest(id="a", tokens=[5, 6, 7], params=params, options=option))
    loop.add(GenerateRequest(id="free", tokens=[5, 6], params=params))
    said: dict[str, list[int]] = {"a": [], "free": []}
    while loop.busy:
        for delta in loop.step():
            said[delta.id] += delta.tokens
    loop.check_idle()
    assert len(said["free"]) == 60
    assert not hook._watches
    return TOKENIZER.decode(said["a"], skip_special_tokens=False)


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("tokens", [0, 1, 5])
def test_reasoning_ends_with_its_budget(tokens: int, depth: int) -> None:
    thoughts = "abcdefgh" * 10
    kept = TOKENIZER.decode(TOKENIZER.encode(thoughts, add_special_tokens=False)[:tokens])
    said = output(thoughts, tokens, is_open=True, depth=depth)
    assert said.startswith(kept + "</think>")
    assert said.count("</think>") == 1
    said = output("<think>" + thoughts, tokens, is_open=False, depth=depth)
    assert said.startswith("<think>" + kept + "</think>")


@pytest.mark.parametrize("depth", [0, 2])
def test_who_ends_in_time_or_does_not_think_is_left_alone(depth: int) -> None:
    in_time = "abc</think>answer"
    assert output(in_time, 20, is_open=True, depth=depth).startswith(in_time + "xxx")
    answer = "<thirty words without a thought>"
    assert output(answer, 3, is_open=False, depth=depth).startswith(answer + "xxx")


def test_steps_wait_for_tokens_only_near_the_end() -> None:
    waits: list[bool] = []
    output("abcdefgh" * 10, 20, is_open=True, depth=1, ahead=waits)
    assert not any(waits[:19])
    assert any(waits[19:30])
    assert not any(waits[40:])


def test_the_count_does_not_hang_on_how_the_text_was_cut() -> None:
    rng = random.Random(1)
    for _ in range(50):
        text = "".join(rng.choice(["<", "/", "think", ">", " ", "é", "</think>"]) for _ in range(12))
        watch = Watch(ThinkingBudget(tokens=1000, begin="<think>", end="</think>", open=True), TOKENIZER)
        for token in TOKENIZER.encode(text, add_special_tokens=False):
            if not watch.done:
                watch.read(token)
        assert watch.done == ("</think>" in text)
