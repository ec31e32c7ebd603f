"""Tokens under logits processors do not depend on how the engine got to them, and one that fails harms nobody else."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from functools import cache
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor
from toy_engine import tiny_config
from toy_models import LLAMA_KV_BYTES_PER_TOKEN, VOCAB, behind, model_files

from octavo.build import build_core
from octavo.core.params import SamplingParams
from octavo.core.plan import StepPlan
from octavo.core.request import GenerateRequest
from octavo.features.logits_processors import AdapterLogitsProcessor, BatchUpdate, LogitsProcessor, Row

SMALL = {"memory_bytes": 128 * LLAMA_KV_BYTES_PER_TOKEN, "max_model_len": 112}
SETTINGS: dict[str, dict[str, Any]] = {
    "all at once": {},
    "overlap": {"async_scheduling": True},
    "chunked prefill": {"max_num_batched_tokens": 8, "max_num_seqs": 8},
    "preemption": SMALL,
    "overlap + preemption": {"async_scheduling": True, **SMALL},
    "overlap + small batches": {"async_scheduling": True, "max_num_seqs": 3},
}


class Sums(LogitsProcessor):
    """Own interface, whole batches: the next token hangs on all tokens so far, which it adds up as they come."""

    def accepts(self, params: SamplingParams) -> bool:
        return "sums" in (params.extra_args or {})

    def apply(self, logits: Tensor, rows: Sequence[Row]) -> None:
        assert logits.shape == (len(rows), VOCAB)
        for place, row in enumerate(rows):
            seen, total = row.state or (0, sum(row.prompt_ids))
            total += sum(row.output_ids[seen:])
            row.state = (len(row.output_ids), total)
            if row.params.extra_args["sums"] == "fail" and len(row.output_ids) == 3:
                logits.fill_(float("nan"))
                raise RuntimeError("three is too many")
            logits[place, 4 + total % (VOCAB - 4)] += 40.0


class NoRepeats(AdapterLogitsProcessor):
    """One function a request: no token twice."""

    def new_req_logits_processor(self, params: SamplingParams) -> Any:
        if "once" not in (params.extra_args or {}):
            return None

        def apply(output_ids: list[int], logits: Tensor) -> Tensor:
            logits[torch.tensor(output_ids, dtype=torch.long)] = float("-inf")
            return logits

        return apply


class Every:
    """vLLM's batch interface: every third token is the target."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        assert vllm_config.model_config.get_vocab_size() == VOCAB
        self.there: dict[int, tuple[int, list[int]]] = {}

    @classmethod
    def validate_params(cls, params: SamplingParams) -> None:
        if (params.extra_args or {}).get("target", 0) >= VOCAB:
            raise ValueError("target is out of the vocabulary")

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, update: BatchUpdate | None) -> None:
        if update is None:
            return
        for place in update.removed:
            del self.there[place]
        for place, params, _, output in update.added:
            self.there[place] = ((params.extra_args or {}).get("target", -1), output)
        for source, place, _ in update.moved:
            self.there[place] = self.there.pop(source)
        assert sorted(self.there) == list(range(update.batch_size))

    def apply(self, logits: Tensor) -> Tensor:
        assert len(logits) == len(self.there)
        for place, (target, output) in self.there.items():
            if target >= 0 and len(output) % 3 == 2:
                logits[place] = float("-inf")
                logits[place, target] = 0.0
        return logits


def everyone(prompt_ids: list[int], output_ids: list[int], logits: Tensor) -> Tensor:
    """A plain function, for all requests."""
    return logits + torch.nn.functional.one_hot(torch.tensor(prompt_ids[-1], device=logits.device), VOCAB)


PROCESSORS = (Sums(), NoRepeats, Every, everyone)


def request(name: str, extra: dict[str, Any] | None, **params: Any) -> GenerateRequest:
    number = sum(map(ord, name))
    return GenerateRequest(
        id=name,
        tokens=[4 + (number * step) % (VOCAB - 4) for step in range(1, 10 + number % 23)],
        params=SamplingParams(**{"max_tokens": 20 + number % 30, "min_tokens": 9, "temperature": 0, **params}),
        options={"logits_processors": msgspec.Raw(msgspec.msgpack.encode(extra))},
    )


def searching(one: GenerateRequest) -> GenerateRequest:
    """The same request as a search with two beams."""
    option = msgspec.Raw(msgspec.msgpack.encode([2, 1.0]))
    return msgspec.structs.replace(one, options=one.options | {"beams": option})


def requests() -> list[GenerateRequest]:
    return [
        request("plain", None),
        request("sums", {"sums": 1}),
        request("sums, drawn", {"sums": 1}, temperature=0.9, n=2, seed=5),
        request("once", {"once": True}),
        request("target", {"target": 77}),
        request("target, drawn", {"target": 9}, temperature=1.2, n=3, seed=1),
        request("all", {"sums": 1, "once": 1, "target": 30}, repetition_penalty=1.2),
        searching(request("beams", {"sums": 1}, n=2, temperature=1, min_tokens=0, max_tokens=9)),
        request("another", {"target": 50}),
        request("last", {"sums": 1, "target": 8}, logprobs=2),
    ]


class Faulty:
    """An executor of which one step raises, before or after processors were at its logits."""

    def __init__(self, executor: Any, *, late: bool) -> None:
        self.executor, self.late = executor, late

    def forward(self, plan: StepPlan) -> Any:
        return self.executor.forward(plan)

    def sample(self, step: Any, payload: dict[str, Any]) -> None:
        if step.plan.id != 9 or self.late:
            self.executor.sample(step, payload)
        if step.plan.id == 9:
            raise RuntimeError("a planted fault")

    def close(self) -> None:
        self.executor.close()


def run(
    asked: list[GenerateRequest],
    *,
    at_once: int = 2,
    fault: str = "",
    drafted: dict[str, int] | None = None,
    **settings: Any,
) -> dict[tuple[str, int], tuple[list[int], str | None]]:
    processors = settings.pop("logits_processors", list(PROCESSORS))
    loop, info = build_core(tiny_config(logits_processors=processors, **settings), model_files())
    assert "logits_processors" in info.features
    if fault:
        loop._executor = Faulty(loop._executor, late=fault == "late")
    found: dict[tuple[str, int], tuple[list[int], str | None]] = {}
    waiting = list(asked)
    while waiting or loop.busy:
        for _ in range(at_once if at_once > 1 or not loop.busy else 0):
            if waiting:
                loop.add(waiting.pop(0))
        for delta in loop.step():
            tokens, error = found.get((delta.id, delta.index), ([], None))
            found[delta.id, delta.index] = (tokens + delta.tokens, delta.error or error)
            if drafted is not None and len(delta.tokens) > 1:
                drafted[delta.id] = drafted.get(delta.id, 0) + len(delta.tokens) - 1
    loop.check_idle()
    if "max_model_len" in settings:
        assert loop.stats().num_preemptions > 0
    loop.close()
    return found


@cache
def truth() -> dict[tuple[str, int], tuple[list[int], str | None]]:
    return run(requests(), at_once=1, attention_backend="reference", enable_prefix_caching=False)


@pytest.mark.parametrize("name", SETTINGS)
def test_tokens_under_processors_do_not_depend_on(name: str) -> None:
    assert run(requests(), **SETTINGS[name]) == truth()


@pytest.mark.features("speculation")
@pytest.mark.parametrize("depth", [0, 2])
def test_drafts_are_for_the_requests_that_no_processor_concerns(depth: int) -> None:
    """Both kinds are in the same steps."""
    params = SamplingParams(max_tokens=40, temperature=0)
    free = [GenerateRequest(id=f"free {n}", tokens=[9, 8 + n, 7] * 4, params=params) for n in range(3)]
    asked = [*free, request("sums", {"sums": 1}), request("once", {"once": True}), request("target", {"target": 77})]
    lookup = {"method": "ngram", "adaptive": False, "prompt_lookup_min": 1}
    processors = [Sums(), NoRepeats, Every]
    expected = run(asked, logits_processors=processors)
    drafted: dict[str, int] = {}
    found = run(asked, logits_processors=processors, speculative_config=lookup, depth=depth, drafted=drafted)
    assert found == expected
    assert drafted.keys() == {one.id for one in free}


def test_processors_may_be_in_another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each process makes its own; what they know of a request's tokens comes with the plans."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    names = [f"{__name__}:{name}" for name in ("Sums", "NoRepeats", "Every", "everyone")]
    found = run(requests(), logits_processors=names, distributed_executor_backend="mp", async_scheduling=True)
    assert found == truth()


@pytest.mark.parametrize("fault", ["early", "late"])
@pytest.mark.parametrize("overlap", [False, True])
def test_a_step_that_fails_loses_no_token_on_the_way_to_a_processor(overlap: bool, fault: str) -> None:
    assert run(requests(), fault=fault, async_scheduling=overlap) == truth()


def test_the_truth_shows_every_processor() -> None:
    found = {name: tokens for (name, index), (tokens, error) in truth().items() if not index and not error}
    assert len(found) == len(requests())
    assert len(set(found["once"])) == len(found["once"])
    assert len(set(found["plain"])) < len(found["plain"])
    for name, target in {"target": 77, "target, drawn": 9, "another": 50, "all": 30}.items():
        assert set(found[name][2:3] if name == "all" else found[name][2::3]) == {target}
    total = sum(request("sums", None).tokens)
    for token in found["sums"]:
        assert token == 4 + total % (VOCAB - 4)
        total += token


@pytest.mark.parametrize("overlap", [False, True])
def test_one_that_fails_or_is_refused_ends_alone(overlap: bool) -> None:
    bad = request("bad", {"sums": "fail"}, n=2, temperature=0.5, seed=3)
    refused = request("refused", {"target": VOCAB})
    found = run([*requests()[:4], bad, refused, *requests()[4:]], async_scheduling=overlap)
    for index in (0, 1):
        tokens, error = found.pop(("bad", index))
        assert len(tokens) == 3
        assert error == "The logits processor --logits-processors Sums failed: RuntimeError: three is too many"
    assert found.pop(("refused", 0)) == ([], "target is out of the vocabulary")
    assert found == truth()


def test_the_resident_runner_gives_the_same_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    asked = [
        msgspec.structs.replace(request(name, extra, max_tokens=4, min_tokens=4), tokens=[5, 6, 7])
        for name, extra in (("all", {"sums": 1, "once": 1, "target": 30}), ("bad", {"sums": "fail"}), ("plain", None))
    ]
    expected = run(asked)
    assert run(asked, **behind(monkeypatch)) == expected
