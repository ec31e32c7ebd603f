"""Whatever ends an output, or forbids or reports a token, holds at each draft, for every method that drafts.

Drafts go on beyond the ends: they are right, with a chance, about what the model would write without them.
"""

from __future__ import annotations

import random
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import toy_models
from draft_models import folder_of
from toy_drafter import News, check_same, corrected, news_of
from toy_engine import drive, one_by_one, strict, tiny_config
from toy_models import LLAMA, VOCAB, model_files

from octavo import LLM, build_worker
from octavo.build import build_core
from octavo.core.output import FinishReason, RequestOutput
from octavo.core.params import RepetitionDetection, RequestOutputKind, SamplingParams
from octavo.core.request import GenerateRequest
from octavo.engine.loop import EngineLoop

TARGET = LLAMA | {"num_nextn_predict_layers": 1}
HEADS: dict[str, dict[str, Any]] = {
    "draft_model": {},
    "eagle": {"num_hidden_layers": 1},
    "eagle3": {"num_hidden_layers": 1, "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}},
    "medusa": {"medusa_num_heads": 4},
    "mtp": {},
    "ngram": {},
}
ENDS: list[dict[str, Any]] = [
    {"max_tokens": 1},
    {"max_tokens": 2},
    {"max_tokens": 5, "ignore_eos": True},
    {"stop_token_ids": list(range(4, 30)), "logprobs": 1},
    {"stop_token_ids": list(range(30, 50)), "min_tokens": 7, "prompt_logprobs": 1},
    {"stop_token_ids": list(range(4, 24)), "min_tokens": 16, "n": 2, "temperature": 0.8, "seed": 4},
    {"bad_token_ids": [[40], [41, 42], [7, 8, 9]], "logit_bias": {7: 3.0, 8: 3.0, 9: 3.0, 41: 2.0, 42: 2.0}},
    {"allowed_token_ids": list(range(20, 40)), "temperature": 0.9, "seed": 1, "logprobs": 3},
    {"logit_bias": {5: 4.0, 6: 3.5}, "repetition_penalty": 1.4, "logprobs": 2},
    {"repetition_detection": RepetitionDetection(max_pattern_size=4, min_count=3), "logit_bias": {11: 9.0}},
    {"logprob_token_ids": [4, 9, 77], "frequency_penalty": 0.7, "temperature": 0.6, "seed": 2},
    {"min_p": 0.1, "temperature": 1.2, "seed": 8, "n": 3, "presence_penalty": 0.3, "logprobs": 0},
]
SETTINGS: dict[str, dict[str, Any]] = {
    "no overlap": {},
    "overlap": {"async_scheduling": True},
    "depth 2, preemption": {"depth": 2, "policy": "priority", "max_num_seqs": 3},
}


@cache
def requests(*, endless: bool = False) -> list[GenerateRequest]:
    """`endless`: without what ends them early, so that their outputs go on where the others end."""
    rng = random.Random(3)
    made = []
    for i, own in enumerate(ENDS):
        prompt = [rng.randrange(4, VOCAB) for _ in range(rng.randrange(2, 30))]
        params = SamplingParams(**{"max_tokens": 24, "temperature": 0} | own)
        if endless:
            params = params.replace(
                max_tokens=40, ignore_eos=True, stop_token_ids=None, min_tokens=0, repetition_detection=None
            )
        made.append(GenerateRequest(id=f"r{i}", tokens=prompt, params=params, priority=-i))
    return made


def engine(**settings: Any) -> EngineLoop:
    loop = build_core(tiny_config(device="cpu", **settings), model_files(TARGET))[0]
    return strict(loop)


@cache
def truth(*, endless: bool = False) -> News:
    loop = engine(async_scheduling=False)
    found = news_of(list(one_by_one(loop, requests(endless=endless))))
    loop.close()
    return found


def ways() -> list[Any]:
    """Each method with each of the settings; those that differ little from others are marked slow."""
    quick = [(method, name) for method in HEADS for name in SETTINGS if method == "eagle3" or "depth" in name]
    every = [(method, name) for method in HEADS for name in SETTINGS]
    return [pytest.param(*way, marks=[] if way in quick else pytest.mark.slow) for way in every]


@pytest.mark.parametrize(("method", "name"), ways())
def test_ends_bans_and_reports_hold_at_each_draft(
    method: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = {request.id: request.tokens for request in requests()}
    texts = [prompts[key] + tokens for (key, _), (tokens, *_) in truth(endless=True).items()]
    expected = truth()
    halves = build_worker.build_worker_halves

    def with_right_drafts(context: Any) -> Any:
        found = halves(context)
        corrected(next(hook for hook in found if hook.name == "speculation"), texts)
        return found

    monkeypatch.setattr(build_worker, "build_worker_halves", with_right_drafts)
    own: dict[str, Any] = {"method": method, "num_speculative_tokens": 5, "adaptive": False}
    if method not in ("mtp", "ngram"):
        own["model"] = folder_of(LLAMA | HEADS[method], tmp_path / "x")
    if method == "ngram":
        own["prompt_lookup_min"] = 1
    loop = engine(**SETTINGS[name], speculative_config=own)
    check_same(news_of(list(drive(loop, requests()))), expected)
    counts = {one.name: sum(one.values.values()) for one in loop.stats().features}
    drafts, accepted = counts["spec_decode_num_draft_tokens"], counts["spec_decode_num_accepted_tokens"]
    assert accepted > (50 if method != "ngram" else 20)
    assert drafts - accepted > (20 if method != "draft_model" else 2)  # it is the target itself
    if "preemption" in name:
        assert loop.stats().num_preemptions > 0
    loop.close()


def test_the_truth_ends_in_all_ways() -> None:
    ends = Counter(end for *_, end in truth().values())
    assert set(ends) == {FinishReason.STOP, FinishReason.LENGTH, FinishReason.REPETITION}
    lengths = {key: len(tokens) for key, (tokens, *_) in truth().items()}
    assert any(lengths[key] < len(tokens) for key, (tokens, *_) in truth(endless=True).items())
    assert min(lengths["r5", 0], lengths["r5", 1]) > 16 > lengths["r3", 0]


# Stop strings are found in the text, behind the engine

PROMPTS = ["The quick brown fox", "a token is", "x + 1"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy_models.save_decoder(tmp_path_factory.mktemp("decoder"), seed=0)


def outputs(folder: Path, params: list[SamplingParams], **settings: Any) -> list[RequestOutput]:
    with LLM(str(folder), dtype="float32", kv_cache_memory_bytes=2 << 20, threads=1, **settings) as llm:
        found = [output for one in params for output in llm.generate(PROMPTS, one)]
        drafted = [choice.drafts for output in found for choice in output.outputs if choice.drafts is not None]
        if settings:
            assert sum(one.accepted for one in drafted) > 30
        return found


def told(output: RequestOutput) -> Any:
    return [
        (one.index, one.text, one.token_ids, one.finish_reason, one.stop_reason, len(one.logprobs or ()))
        for one in output.outputs
    ]


def test_stop_strings_end_an_output_within_accepted_drafts(folder: Path) -> None:
    """The drafting model is the target itself, so that all its drafts are accepted, also those after the end."""
    plain = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    texts = [output.outputs[0].text for output in outputs(folder, [plain])]
    stops = sorted({text[at : at + size] for text in texts for at, size in ((7, 2), (11, 3), (16, 1)) if text[at:]})
    ways: list[dict[str, Any]] = [
        {},
        {"include_stop_str_in_output": True},
        {"logprobs": 2, "min_tokens": 9},
        {"n": 2, "temperature": 0.7, "seed": 3, "logprobs": 0},
        {"output_kind": RequestOutputKind.FINAL_ONLY, "stop": [*stops[:1], "no such end"]},
    ]
    params = [plain.replace(stop=stops).replace(**way) for way in ways]
    own = {"method": "draft_model", "model": str(folder), "num_speculative_tokens": 7, "adaptive": False}
    expected, found = outputs(folder, params), outputs(folder, [plain, *params], speculative_config=own)[len(PROMPTS) :]
    assert [told(one) for one in found] == [told(one) for one in expected]
    reasons = Counter(type(choice.stop_reason) for output in expected for choice in output.outputs)
    assert reasons[str] > 5
