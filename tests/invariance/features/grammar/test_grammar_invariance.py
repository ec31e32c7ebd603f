"""Tokens under a grammar do not depend on how the engine got to them."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import msgspec
import pytest
from rank_kit import CONTEXTS, PIPELINE, TWO_RANKS, ranks_in_threads
from toy_engine import device_of, drive, one_by_one, tiny_config, tokens_of
from toy_models import LLAMA, LLAMA_KV_BYTES_PER_TOKEN, model_files
from toy_tokenizers import byte_level

from octavo.build import build_core
from octavo.core.params import SamplingParams
from octavo.core.request import GenerateRequest
from octavo.core.structured import StructuredOutputsParams
from octavo.engine.loop import EngineLoop
from octavo.hub.files import ModelFiles

TOKENIZER = byte_level()
MODEL = LLAMA | {"vocab_size": TOKENIZER.get_vocab_size(), "eos_token_id": 2}
FORMS: list[dict[str, Any]] = [
    {"regex": r"(.|\n)*"},
    {"json": {"type": "array", "items": {"type": "integer"}, "maxItems": 9}},
    {"regex": "[a-f]{20,40}"},
    {"choice": ["a rather long choice indeed", "a rather short one", "b"]},
]
SMALL = {"memory_bytes": 128 * LLAMA_KV_BYTES_PER_TOKEN, "max_model_len": 112}
SETTINGS: dict[str, dict[str, Any]] = {
    "overlap": {"async_scheduling": True},
    "chunked prefill": {"max_num_batched_tokens": 8, "max_num_seqs": 8},
    "preemption": SMALL,
    "overlap + preemption": {"async_scheduling": True, **SMALL},
    "overlap + small batches": {"async_scheduling": True, "max_num_seqs": 3},
    "overlap + a process of its own": {"async_scheduling": True, "distributed_executor_backend": "mp"},
    "overlap + two ranks": {"async_scheduling": True, **TWO_RANKS},
    "two stages": PIPELINE,
    "two ranks that divide prompts": CONTEXTS,
    "overlap + two stages + preemption": {"async_scheduling": True, **SMALL, **PIPELINE},
}


@pytest.fixture(autouse=True)
def threads(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks_in_threads(monkeypatch)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> ModelFiles:
    folder = tmp_path_factory.mktemp("tiny")
    TOKENIZER.save(str(folder / "tokenizer.json"))
    return model_files(MODEL, folder)


def requests() -> list[GenerateRequest]:
    made = []
    for i in range(12):
        sampled: dict[str, Any] = {"temperature": 0} if i % 2 else {"temperature": 0.9, "seed": i, "n": 2}
        form = FORMS[i % len(FORMS)]
        option = msgspec.Raw(msgspec.msgpack.encode(StructuredOutputsParams(**form)))
        made.append(
            GenerateRequest(
                id=f"r{i}",
                tokens=list(range(10, 20 + 2 * i)),
                params=SamplingParams(max_tokens=24 + 3 * i, **sampled),
                options={"grammar": option},
            )
        )
    return made


def engine(files: ModelFiles, **settings: Any) -> EngineLoop:
    loop, info = build_core(tiny_config(**settings), files)
    assert "grammar" in info.features
    return loop


def run(files: ModelFiles, asked: list[GenerateRequest], **settings: Any) -> dict[tuple[str, int], list[int]]:
    loop = engine(files, **settings)
    tokens = tokens_of(drive(loop, asked, at_once=len(asked)))
    loop.close()
    if "memory_bytes" in settings:
        assert loop.stats().num_preemptions > 0
    return tokens


@pytest.fixture(scope="module")
def truth(files: ModelFiles) -> Callable[[str], dict[tuple[str, int], list[int]]]:
    """Each request alone, with nothing left in the cache by others, on a device (draws differ between devices)."""

    @cache
    def alone(device: str) -> dict[tuple[str, int], list[int]]:
        loop = engine(files, enable_prefix_caching=False, async_scheduling=False, device=device)
        found = tokens_of(one_by_one(loop, requests()))
        loop.close()
        return found

    return alone


LONG_TAIL = "two ranks that divide prompts"


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name == LONG_TAIL else name for name in SETTINGS]
)
def test_tokens_under_a_grammar_do_not_depend_on(
    name: str, files: ModelFiles, truth: Callable[[str], dict[tuple[str, int], list[int]]]
) -> None:
    assert run(files, requests(), **SETTINGS[name]) == truth(device_of(SETTINGS[name]))
