"""Structured output has drafts of every kind, and is the same with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from draft_models import folder_of
from toy_drafter import News, check_same, news_of
from toy_engine import drive, strict, tiny_config
from toy_models import LLAMA, model_files
from toy_tokenizers import byte_level

from octavo.build import build_core
from octavo.core.params import SamplingParams
from octavo.core.request import GenerateRequest
from octavo.core.structured import StructuredOutputsParams
from octavo.engine.loop import EngineLoop

pytestmark = pytest.mark.features("grammar")

TOKENIZER = byte_level()
MODEL = LLAMA | {"vocab_size": TOKENIZER.get_vocab_size(), "eos_token_id": 2}
METHODS: dict[str, dict[str, Any]] = {
    "ngram": {"prompt_lookup_min": 1},
    "suffix": {"prompt_lookup_min": 1},
    "draft_model": MODEL,
    "eagle": MODEL | {"num_hidden_layers": 1},
    "medusa": MODEL | {"medusa_num_heads": 3},
}


def requests() -> list[GenerateRequest]:
    """Of letters whose repetitions are long, so that lookups find them; every third without a grammar."""
    made = []
    for i in range(9):
        option = msgspec.Raw(msgspec.msgpack.encode(StructuredOutputsParams(regex=("(ab|c){15,}", "[a-d]{30}")[i % 2])))
        sampled: dict[str, Any] = {"temperature": 0} if i % 2 else {"temperature": 0.6, "seed": i, "logprobs": 1}
        params = SamplingParams(max_tokens=36, **sampled)
        prompt = TOKENIZER.encode("abcab" * (i + 1)).ids
        made.append(
            GenerateRequest(id=f"r{i}", tokens=prompt, params=params, options={"grammar": option} if i % 3 else {})
        )
    return made


def engine(folder: Path, **settings: Any) -> EngineLoop:
    TOKENIZER.save(str(folder / "tokenizer.json"))
    loop = build_core(tiny_config(device="cpu", **settings), model_files(MODEL, folder))[0]
    return strict(loop)


def run(loop: EngineLoop) -> tuple[News, float, float]:
    news = news_of(list(drive(loop, requests())))
    counts = {one.name: sum(one.values.values()) for one in loop.stats().features}
    loop.close()
    return (
        news,
        counts.get("spec_decode_num_draft_tokens", 0.0),
        counts.get("spec_decode_num_accepted_tokens", 0.0),
    )


@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize("method", METHODS)
def test_structured_output_is_the_same_with_drafts(method: str, depth: int, tmp_path: Path) -> None:
    expected, *_ = run(engine(tmp_path))
    own: dict[str, Any] = {"method": method, "num_speculative_tokens": 4, "adaptive": False}
    lookup = method in ("ngram", "suffix")
    if not lookup:
        own["model"] = folder_of(METHODS[method], tmp_path / "x")
        if method == "eagle":
            own["prompt_lookup_min"] = 0
        if method == "draft_model":
            TOKENIZER.save(str(tmp_path / "x" / "tokenizer.json"))
    found, drafts, accepted = run(
        engine(tmp_path, depth=depth, speculative_config=own | (METHODS[method] if lookup else {}))
    )
    check_same(found, expected)
    assert drafts > (20 if depth else 0)
    assert accepted > 20 or method in ("eagle", "medusa"), "random heads are hardly ever right"


@pytest.mark.parametrize("backend", ["torch", "native"])
@pytest.mark.parametrize("depth", [0, 1])
def test_a_draft_may_complete_the_grammar_before_min_tokens(depth: int, backend: str, tmp_path: Path) -> None:
    """The position behind it is never used. There the grammar allows the end of the sequence only, which is forbidden
    before `min_tokens`."""
    option = msgspec.Raw(msgspec.msgpack.encode(StructuredOutputsParams(choice=["abcabcabc", "abcd", "xyz"])))
    asked = [
        GenerateRequest(
            id=str(i),
            tokens=TOKENIZER.encode("abcab" * i).ids,
            params=SamplingParams(temperature=0, min_tokens=14, max_tokens=36),
            options={"grammar": option},
        )
        for i in range(1, 6)
    ]
    found = []
    lookup = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "adaptive": False}
    for settings in ({}, {"speculative_config": lookup}):
        loop = engine(tmp_path, attention_backend=backend, depth=depth, **settings)
        found.append(news_of(list(drive(loop, asked))))
        loop.close()
    check_same(found[1], found[0])
