"""Adapters of experts in native programs: tokens and log-probabilities are those of merged weights."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
import torch
from rank_kit import PIPELINE, ranks_in_threads
from tiny import make_checkpoint, model_files
from tiny_adapters import save_adapter
from tiny_expert_adapters import FORMS, save_and_merge
from toy_engine import drive, tiny_config

from octavo.build import build_core
from octavo.core.params import SamplingParams
from octavo.core.request import GenerateRequest
from octavo.engine.loop import EngineLoop
from octavo.features.lora.payload import NAME
from octavo.features.lora.requests import Part, encode
from octavo.models.native import NativeDecoder

SETTINGS: dict[str, dict[str, Any]] = {
    "at once": {},
    "chunks": {"async_scheduling": True, "max_num_batched_tokens": 8},
    "little memory": {"async_scheduling": True, "num_blocks": 76, "max_model_len": 48, "watermark": 0.0},
}
TOKENS = 34
WIDTHS = {
    "llama4": {"intermediate_size": 48, "intermediate_size_mlp": 64},
    "qwen2-moe": {"shared_expert_intermediate_size": 48},
}
"""Sizes of dense feed-forwards in whole panels, which the kernels need for adapters."""


class Found(NamedTuple):
    tokens: list[int]
    logprobs: list[float]


def asking(name: str, number: int, *, base: bool = False) -> GenerateRequest:
    prompt = [(7 * number + 3 * place) % 199 for place in range(5 + 3 * number)]
    params = SamplingParams(max_tokens=TOKENS, temperature=0, ignore_eos=True, logprobs=0)
    options = {} if base else {NAME: encode((Part(name),))}
    return GenerateRequest(id=name, tokens=prompt, params=params, options=options)


def engine(model: Path, adapters: Mapping[str, Path], **settings: Any) -> EngineLoop:
    modules = tuple(f"{name}={path}" for name, path in adapters.items())
    native = {"load_format": "auto", "device": "cpu", "attention_backend": "native", "num_blocks": 400}
    return build_core(tiny_config(**native | {"lora_modules": modules} | settings), model_files(model))[0]


def answers(loop: EngineLoop, asked: Sequence[GenerateRequest]) -> dict[str, Found]:
    found = {one.id: Found([], []) for one in asked}
    for delta in drive(loop, asked, at_once=len(asked)):
        assert delta.error is None, delta.error
        found[delta.id].tokens.extend(delta.tokens)
        found[delta.id].logprobs.extend(entry.logprob for entry in delta.logprobs or ())
    return found


class Case(NamedTuple):
    """A base model with adapters, and what the merged models answer."""

    base: Path
    adapters: dict[str, Path]
    asked: list[GenerateRequest]
    expected: dict[str, Found]


def case_of(
    family: str, folder: Path, ranks: Sequence[int], forms: Sequence[str] = tuple(FORMS), *, transposed: bool = False
) -> Case:
    """Adapters of these ranks, in the forms of files in turns."""
    theirs = make_checkpoint(family, folder / "base", WIDTHS.get(family))
    made = torch.Generator().manual_seed(1)
    adapters: dict[str, Path] = {}
    merged = {"base": folder / "base"}
    for i, rank in enumerate(ranks):
        name, own = f"e{i}", copy.deepcopy(theirs)
        form = forms[i % len(forms)]
        adapters[name] = save_and_merge(own, folder / name, form, rank, made, transposed=transposed)
        own.save_pretrained(folder / f"{name}-merged")
        merged[name] = folder / f"{name}-merged"
    asked = [asking(name, i % 4, base=name == "base") for i, name in enumerate(merged)]
    expected: dict[str, Found] = {}
    for one in asked:
        loop = engine(merged[one.id], {})
        expected |= answers(loop, [msgspec.structs.replace(one, options={})])
        loop.close()
    return Case(folder / "base", adapters, asked, expected)


def compare(found: Mapping[str, Found], expected: Mapping[str, Found], tolerance: float = 1e-4) -> None:
    for name, one in expected.items():
        assert found[name].tokens == one.tokens, name
        assert found[name].logprobs == pytest.approx(one.logprobs, abs=tolerance), name


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return case_of("qwen3-moe", tmp_path_factory.mktemp("qwen3-moe"), (2, 3, 16))


@pytest.mark.parametrize("kind", SETTINGS)
def test_answers_are_those_of_merged_experts(kind: str, case: Case) -> None:
    loop = engine(case.base, case.adapters, **SETTINGS[kind])
    several = [msgspec.structs.replace(one, id=f"{one.id} {i}") for one in case.asked for i in range(4)]
    found = answers(loop, several)
    compare(found, {one.id: case.expected[one.id.partition(" ")[0]] for one in several})
    assert len({tuple(one.logprobs) for one in case.expected.values()}) == len(case.expected)
    evictions = next(one.values[""] for one in loop.stats().features if one.name == "lora_evictions")
    assert (kind == "little memory") == (loop._scheduler.stats().num_preemptions > 0) == (evictions > 0)
    loop.close()


@pytest.mark.slow
def test_answers_of_stages(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks_in_threads(monkeypatch)
    loop = engine(case.base, case.adapters, **PIPELINE, **SETTINGS["chunks"])
    compare(answers(loop, case.asked), case.expected)
    loop.close()


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gpt-oss", "mixtral", *WIDTHS])
def test_answers_of_other_families(family: str, tmp_path: Path) -> None:
    """Clamped gates and biases; square matrices apart; weights on the inputs; a shared expert."""
    transposed = family in ("gpt-oss", "llama4")
    own = case_of(family, tmp_path, (2, 5), ["stacked"], transposed=transposed)
    loop = engine(own.base, own.adapters)
    compare(answers(loop, own.asked), own.expected)
    loop.close()


def test_twelve_adapters_and_the_base_in_one_step(tmp_path: Path) -> None:
    """Each answer is that of the request alone, to the bit."""
    theirs = make_checkpoint("qwen3-moe", tmp_path / "base")
    made = torch.Generator().manual_seed(2)
    forms = list(FORMS)
    adapters = {}
    for i in range(12):
        adapters[f"e{i}"] = save_and_merge(copy.deepcopy(theirs), tmp_path / f"e{i}", forms[i % 3], 2 + i % 4, made)
    asked = [asking("base", 1, base=True), *(asking(name, i % 4) for i, name in enumerate(adapters))]
    loop = engine(tmp_path / "base", adapters, max_num_seqs=13, num_blocks=2000, memory_bytes=1 << 24)
    alone = {one.id: answers(loop, [one])[one.id] for one in asked}
    sizes: list[int] = []
    found = {one.id: Found([], []) for one in asked}
    for one in asked:
        loop.add(one)
    while loop.busy:
        deltas = loop.step()
        sizes.append(len(deltas))
        for delta in deltas:
            found[delta.id].tokens.extend(delta.tokens)
            found[delta.id].logprobs.extend(entry.logprob for entry in delta.logprobs or ())
    assert max(sizes) == len(asked)
    assert found == alone
    loop.close()


def test_steps_without_adapters_of_experts_have_programs_without_their_additions(case: Case, tmp_path: Path) -> None:
    config = msgspec.json.decode((case.base / "config.json").read_bytes())
    attention = save_adapter(tmp_path / "attention", config, seed=1, targets=("q_proj", "v_proj"))
    loop = engine(case.base, {"attention": attention, "e0": case.adapters["e0"]})
    model = loop._executor._model  # type: ignore[attr-defined]
    assert isinstance(model, NativeDecoder)
    counts = []
    for one in (asking("base", 1, base=True), asking("attention", 1), asking("e0", 1)):
        answers(loop, [one])
        counts.append(len(model._programs))
    assert counts == [1, 2, 3]
    loop.close()
