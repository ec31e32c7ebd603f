"""A grammar's way through the engine: compiled aside, masked each step, refused or ended alone."""

from __future__ import annotations

import json
import random
import re
import threading
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from toy_tokenizers import byte_level

from octavo.cache.cache import KVCache
from octavo.core.errors import InvalidRequestError
from octavo.core.output import FinishReason, StepOutput, TokenDelta
from octavo.core.params import SamplingParams
from octavo.core.request import GenerateRequest
from octavo.core.structured import StructuredOutputsParams
from octavo.engine.loop import EngineLoop
from octavo.features import FeatureContext, build_engine_halves, build_worker_halves
from octavo.features.grammar import compiler as compiler_module
from octavo.features.grammar import engine as engine_module
from octavo.features.grammar.compiler import Compiler
from octavo.features.grammar.defaults import StructuredDefaults
from octavo.features.grammar.engine import GrammarEngine
from octavo.features.grammar.payload import Masks
from octavo.features.grammar.worker import GrammarWorker
from octavo.sampling.allowed import forbid
from octavo.schedule.policy import make_policy
from octavo.schedule.scheduler import Limits, Scheduler
from octavo.text.tokenizers.tokenizer import Tokenizer

TOKENIZER = Tokenizer(byte_level(), named_tokens={"eos_token": "</s>"})
EOS = 2
VOCAB = TOKENIZER.vocab_size + 5  # a model's head is often larger than its vocabulary


def option(**form: Any) -> dict[str, msgspec.Raw]:
    return {"grammar": msgspec.Raw(msgspec.msgpack.encode(StructuredOutputsParams(**form)))}


class RandomStep:
    def __init__(self, plan: Any) -> None:
        self.plan = plan
        self.output: StepOutput | None = None

    def result(self) -> StepOutput:
        assert self.output is not None
        return self.output


class RandomDevice:
    """Samples any token that the worker half leaves possible, evenly: the worst model there is."""

    def __init__(self, seed: int) -> None:
        self.worker = GrammarWorker("grammar")
        self.random = random.Random(seed)
        self.early: list[bool] = []

    def forward(self, plan: Any) -> RandomStep:
        self.early.append("grammar" in plan.payload)
        return RandomStep(plan)

    def sample(self, step: RandomStep, payload: dict[str, Any]) -> None:
        plan, payload = step.plan, step.plan.payload | payload
        rows = [row for row, samples in enumerate(plan.samples) if samples]
        logits = torch.zeros(len(rows), VOCAB)
        failed: Mapping[int, str] = {}
        if payload:
            allowed = self.worker.allowed([plan.slots[row] for row in rows], payload["grammar"])
            failed = allowed.errors
            forbid(logits, allowed)
        tokens: list[list[int]] = [[] for _ in plan.slots]
        for place, row in enumerate(rows):
            possible = torch.nonzero(logits[place] == 0).squeeze(-1).tolist()
            tokens[row] = [self.random.choice(possible)] if possible else [0]
        step.output = StepOutput(tokens, errors={rows[place]: error for place, error in failed.items()})

    def close(self) -> None:
        pass


class House:
    def __init__(self, *, depth: int = 0, seed: int = 0, compiler: Compiler | None = None, device: str = "cpu") -> None:
        self.compiler = compiler or Compiler(lambda: TOKENIZER, VOCAB, (EOS,))
        self.hook = GrammarEngine("grammar", self.compiler, device)
        limits = Limits(max_num_seqs=8, max_num_batched_tokens=64, max_model_len=512, max_ahead=depth + 1)
        self.scheduler = Scheduler(KVCache(512, 4), limits, make_policy("fcfs"), eos_token_ids=[EOS], hooks=[self.hook])
        self.device = RandomDevice(seed)
        self.loop = EngineLoop(self.scheduler, self.device, depth)
        self.deltas: list[TokenDelta] = []

    def ask(self, name: str, options: dict[str, msgspec.Raw], **params: Any) -> None:
        sampling = SamplingParams(**{"max_tokens": 200, **params})
        self.loop.add(GenerateRequest(id=name, tokens=[5, 6, 7], params=sampling, options=options))

    def run(self) -> House:
        while self.loop.busy:
            self.deltas += self.loop.step()
        self.loop.check_idle()
        return self

    def text(self, name: str, index: int = 0) -> str:
        tokens = [t for d in self.deltas if (d.id, d.index) == (name, index) for t in d.tokens]
        return TOKENIZER.decode(tokens)

    def end(self, name: str, index: int = 0) -> TokenDelta:
        (end,) = [d for d in self.deltas if (d.id, d.index) == (name, index) and d.finish is not None]
        return end


# Each rule in all the ways in which the next one can be read, twice.
DEEP = "start: r0\n" + "".join(f'r{i}: r{i + 1} r{i + 1} | r{i + 1} | ""\n' for i in range(300)) + 'r300: /./ | ""'
ITEM = {"type": "object", "properties": {"n": {"type": "integer"}, "s": {"enum": ["a", "b"]}}, "required": ["n", "s"]}


@pytest.mark.parametrize(
    ("depth", "together", "device"), [(0, False, "cpu"), (0, True, "cpu"), (1, True, "cuda"), (2, False, "cuda")]
)
def test_even_random_logits_give_the_form(
    depth: int, together: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "_LONG_S", -1.0 if together else 1e9)
    monkeypatch.setattr(engine_module, "physical_cores", lambda: 4)
    house = House(depth=depth, seed=depth, device=device)
    closed = ITEM | {"additionalProperties": False}
    for i in range(12):
        house.ask(f"json{i}", option(json=closed), n=1 + i % 2)
        house.ask(f"free{i}", {}, max_tokens=5, ignore_eos=True)
        house.ask(f"choice{i}", option(choice=["north", "south", "südwest"]))
    house.run()
    ended = 0
    for i in range(12):
        for index in range(1 + i % 2):
            end = house.end(f"json{i}", index)
            if end.finish is FinishReason.STOP:
                ended += 1
                value = json.loads(house.text(f"json{i}", index))
                assert set(value) == {"n", "s"}
            else:
                assert end.finish is FinishReason.LENGTH
        assert house.text(f"choice{i}") in ("north", "south", "südwest")
        assert house.end(f"choice{i}").complete
        assert house.end(f"free{i}").finish is FinishReason.LENGTH
    assert ended > 0, "none came to its end, so nothing was parsed"


def test_an_output_ends_as_soon_as_nothing_can_follow() -> None:
    """No step is spent on an end-of-sequence token, so it needs none and `min_tokens` can't forbid it."""
    house = House()
    house.ask("a", option(choice=["x"]), min_tokens=5, ignore_eos=True)
    house.run()
    assert house.text("a") == "x"
    end = house.end("a")
    assert (end.finish, end.complete, end.stop_reason) == (FinishReason.STOP, True, None)


def test_an_output_that_could_go_on_ends_with_the_models_own_end() -> None:
    house = House(seed=3)
    house.ask("a", option(regex="[ab]+"), max_tokens=150)
    house.run()
    end = house.end("a")
    assert (end.finish, end.complete) == (FinishReason.STOP, False)
    assert set(house.text("a")) <= set("ab")


def test_nobody_waits_for_a_grammar_that_is_being_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()

    def slow() -> Tokenizer:
        gate.wait()
        return TOKENIZER

    house = House(compiler=Compiler(slow, VOCAB, (EOS,)))
    house.ask("slow", option(choice=["x"]))
    house.ask("free", {}, max_tokens=3, ignore_eos=True)
    while not any(d.id == "free" and d.finish for d in house.deltas):
        house.deltas += house.loop.step()
    assert not any(d.id == "slow" for d in house.deltas)
    assert house.loop.busy
    assert house.loop.step() == []
    assert house.loop.starved
    gate.set()
    assert house.run().text("slow") == "x"


@pytest.mark.parametrize(
    ("form", "word"),
    [
        ({"json": {"type": "nope"}}, "nope"),
        ({"json": {"type": "object", "properties": {"a": {"not": {"type": "string"}}}}}, "not"),
        ({"json": {"$ref": "#/nowhere"}}, "nowhere"),
        ({"json": {"type": "integer", "minimum": 5, "maximum": 3}}, "minimum"),
        ({"json": "{"}, "JSON"),
        *[({"json": '{"items":' * depth + "{}" + "}" * depth}, "nested|recursion") for depth in (300, 700, 3000)],
        ({"regex": "(a|b"}, "unclosed"),
        ({"regex": "(?=a)b"}, "look-around"),
        ({"grammar": "start: foo"}, "foo"),
        ({"grammar": DEEP}, "items"),
        ({"structural_tag": {"format": {"type": "regex", "pattern": "("}}}, "structural tag"),
    ],
)
def test_a_bad_form_fails_its_own_request_only(form: dict[str, Any], word: str) -> None:
    house = House()
    house.ask("good", option(choice=["x"]))
    house.ask("bad", option(**form, param="field"), n=2)
    house.ask("after", option(choice=["y"]))
    house.run()
    assert (house.text("good"), house.text("after")) == ("x", "y")
    for index in (0, 1):
        end = house.end("bad", index)
        assert (end.finish, end.refused, end.tokens) == (FinishReason.ERROR, "field", [])
        assert end.error is not None
        assert re.search(word, end.error)
        assert len(end.error) < 700
        assert "<" not in end.error


def test_an_abort_while_compiling_leaves_nothing() -> None:
    gate = threading.Event()

    def slow() -> Tokenizer:
        gate.wait()
        return TOKENIZER

    house = House(compiler=Compiler(slow, VOCAB, (EOS,)))
    house.ask("a", option(choice=["x"]))
    assert house.loop.step() == []
    house.deltas += house.loop.abort("a")
    gate.set()
    assert house.run().end("a").finish is FinishReason.ABORT
    assert house.hook._guides == {}


@pytest.mark.parametrize("form", [{"choice": ["north", "south"]}, {"regex": "[a-f]*"}, {"json_object": True}])
def test_a_grammars_first_mask_is_known_when_it_is_compiled(form: dict[str, Any]) -> None:
    compiled = Compiler(lambda: TOKENIZER, VOCAB, (EOS,)).open(option(**form)["grammar"]).result()
    words = np.zeros_like(compiled.first)
    compiled.matcher.deep_copy().unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
    assert (words == compiled.first).all()
    assert words.any()


def test_the_tokenizer_may_have_added_tokens_without_logits() -> None:
    """As a fine-tuned model has whose padding token was only added to the tokenizer."""
    given = byte_level()
    vocab = given.get_vocab_size()
    given.add_special_tokens(["<pad>"])
    compiled = (
        Compiler(lambda: Tokenizer(given), vocab, (EOS, vocab)).open(option(choice=["north"])["grammar"]).result()
    )
    assert len(compiled.first) == -(-vocab // 32)
    tokens = given.encode("north", add_special_tokens=False).ids
    assert compiled.matcher.deep_copy().validate_tokens([*tokens, EOS]) == len(tokens) + 1


def test_defaults_hold_for_every_request() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "allOf": [{}]}

    def takes(text: str, defaults: StructuredDefaults, **form: Any) -> bool:
        compiler = Compiler(lambda: TOKENIZER, VOCAB, (EOS,), defaults)
        matcher = compiler.open(option(json=schema, **form)["grammar"]).result().matcher.deep_copy()
        tokens = TOKENIZER.encode(text, add_special_tokens=False)
        return bool(matcher.validate_tokens(tokens) == len(tokens))

    loose, spaced, more = StructuredDefaults(), '{"a": 1', '{"a":1,"b":2'
    compact = StructuredDefaults.of({"backend": "guidance", "disable_any_whitespace": True})
    closed = StructuredDefaults.of({"disable_additional_properties": True})
    assert (takes(spaced, loose), takes(spaced, compact), takes('{"a":1', compact)) == (True, False, True)
    assert takes(spaced, compact, whitespace_pattern=" ?")
    assert not takes(spaced, loose, disable_any_whitespace=True)
    assert (takes(more, loose), takes(more, closed)) == (True, False)


def test_grammars_are_compiled_once_and_the_oldest_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler_module, "MAX_KEPT", 2)
    compiler = Compiler(lambda: TOKENIZER, VOCAB, (EOS,))
    one, two, three = (option(choice=[word])["grammar"] for word in ("one", "two", "three"))
    first = compiler.open(one)
    assert compiler.open(one) is first
    second = compiler.open(two)
    assert compiler.open(one) is first
    compiler.open(three)
    assert compiler.open(one) is first
    assert compiler.open(two) is not second


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_masks_are_computed_while_a_device_computes_and_ahead_of_a_cpu(device: str) -> None:
    house = House(device=device)
    house.ask("a", option(choice=["x"]))
    assert house.run().text("a") == "x"
    assert house.device.early == [device == "cpu"]


def test_a_matcher_in_trouble_ends_its_request_with_the_reason() -> None:
    house = House()
    house.ask("a", option(regex="[a-c]{1,50}"), max_tokens=50)
    while not any(d.tokens for d in house.deltas):
        house.deltas += house.loop.step()
    (guide,) = house.hook._guides.values()
    assert guide.matcher is not None
    guide.matcher.consume_token(TOKENIZER.encode("z")[0])  # not of the grammar: the matcher is in error from here on
    house.run()
    end = house.end("a")
    assert end.finish is FinishReason.ERROR
    assert "grammar" in str(end.error)


class Costly:
    """A matcher whose masks or tokens cost a clock so many seconds each; the clock is what the engine half reads."""

    def __init__(self, matcher: Any, clock: list[float], mask_s: float = 0.0, token_s: float = 0.0) -> None:
        self._matcher, self._clock = matcher, clock
        self._mask_s, self._token_s = mask_s, token_s

    def __getattr__(self, name: str) -> Any:
        return getattr(self._matcher, name)

    def unsafe_compute_mask_ptr(self, address: int, size: int) -> None:
        self._clock[0] += self._mask_s
        self._matcher.unsafe_compute_mask_ptr(address, size)

    def try_consume_tokens(self, tokens: list[int]) -> int:
        self._clock[0] += self._token_s
        return int(self._matcher.try_consume_tokens(tokens))


class InOrder:
    """Stands for llguidance's threads, which take nothing but its own matchers."""

    def unsafe_compute_mask_ptr(self, work: list[tuple[Any, int]], address: int, stride: int, count: int) -> None:
        for matcher, place in work:
            matcher.unsafe_compute_mask_ptr(address + place * stride, stride)


@pytest.mark.parametrize("cost", [{"mask_s": 0.1}, {"token_s": 0.1}, {"mask_s": 60.0}])
@pytest.mark.parametrize("threads", [False, True])
def test_a_grammar_that_costs_the_others_too_much_ends_its_request(
    cost: dict[str, float], threads: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    monkeypatch.setattr(engine_module, "perf_counter", lambda: clock[0])
    house = House()
    house.hook._executor = InOrder() if threads else None  # type: ignore[assignment]
    for name, letters in (("costly", "ab"), ("large", "cd")):
        asked = option(regex=f"[{letters}]{{150}}")
        house.compiler.open(asked["grammar"]).result()  # so that both begin with the same step
        house.ask(name, asked, max_tokens=150)
    while len(guides := [g for g in house.hook._guides.values() if g.matcher is not None]) < 2:
        house.deltas += house.loop.step()
    guides[0].matcher = Costly(guides[0].matcher, clock, **cost)  # type: ignore[assignment]
    guides[1].matcher = Costly(guides[1].matcher, clock, mask_s=0.015, token_s=0.015)  # type: ignore[assignment]
    house.run()
    end = house.end("costly")
    assert end.finish is FinishReason.ERROR
    assert "ambiguous" in str(end.error)
    assert 4 < len(house.text("costly")) < 60
    assert len(house.text("large")) == 150


def test_the_worker_half_finds_each_mask_its_row() -> None:
    words = np.random.default_rng().integers(-(2**31), 2**31, (2, 3), dtype=np.int32)
    masks = Masks([9, 7], memoryview(words.tobytes()), {1: "why"})
    allowed = GrammarWorker("grammar").allowed([7, 4, 9], masks)
    assert (allowed.rows, allowed.errors) == ([2, 0], {0: "why"})
    assert (allowed.words == words).all()


def test_the_table_builds_it() -> None:
    context = FeatureContext(vocab_size=VOCAB, eos_token_ids=(EOS,), load_tokenizer=lambda: TOKENIZER)
    for build in (build_engine_halves, build_worker_halves):
        assert "grammar" in [half.name for half in build(context)]


def test_exactly_one_form() -> None:
    for wrong in ({}, {"regex": "a", "choice": ["b"]}, {"regex": ""}, {"choice": []}, {"choice": ["a", ""]}):
        with pytest.raises(InvalidRequestError) as caught:
            StructuredOutputsParams(**wrong)
        assert caught.value.param == "structured_outputs"


@pytest.mark.parametrize(
    ("form", "loop"),
    [
        ({"json": {"$ref": "#"}}, "one of its $ref leads back to itself"),
        ({"json": {"anyOf": [{"$ref": "#"}, {"$ref": "#"}]}}, "one of its $ref leads back to itself"),
        ({"grammar": "root ::= root"}, "one of its rules leads back to itself"),
    ],
)
def test_a_form_that_only_leads_to_itself_is_explained(form: dict[str, Any], loop: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        Compiler(lambda: TOKENIZER, VOCAB, (EOS,)).open(option(**form)["grammar"]).result()
    assert "no output can match it" in str(caught.value)
    assert loop in str(caught.value)
    assert "NoExtensionBias" not in str(caught.value)
