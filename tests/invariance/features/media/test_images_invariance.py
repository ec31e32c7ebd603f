"""Requests with images have the same tokens whatever else the engine does: chunks, cached prefixes, preemption, other
requests, ranks."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
from image_kit import make, picture
from rank_kit import CONTEXTS, PIPELINE, TWO_RANKS, ranks_in_threads

from octavo import LLM, SamplingParams

BASE: dict[str, Any] = {
    "dtype": "float32",
    "kv_cache_memory_bytes": 2 << 20,
    "threads": 1,
    "max_model_len": 256,
    "block_size": 16,
    "max_num_seqs": 8,
}
SMALL = {"kv_cache_memory_bytes": 17 * 16 * 512}
"""Bytes of 17 blocks: one request of the longest, and little more."""
SETTINGS: dict[str, dict[str, Any]] = {
    "overlap": {"async_scheduling": True},
    "chunked prefill": {"max_num_batched_tokens": 8},
    "preemption": SMALL,
    "overlap + chunked prefill + preemption": {"async_scheduling": True, "max_num_batched_tokens": 8, **SMALL},
    "no prefix cache": {"enable_prefix_caching": False},
    "one image encoded at a time": {"mm_encoder_cache_gb": 0.0, "max_num_batched_tokens": 32},
    "torch attention": {"attention_backend": "torch"},
    "a process of its own": {"distributed_executor_backend": "mp"},
    "two ranks": TWO_RANKS,
    "two stages": PIPELINE,
    "two ranks that divide prompts": CONTEXTS,
}
KINDS = ("smolvlm", "qwen2.5-vl")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {kind: make(kind, tmp_path_factory.mktemp(kind)).folder for kind in KINDS}


def prompts(kind: str) -> list[Any]:
    """Some with images, which they share, as they share texts before and after them; some without."""
    mark = "<|vision_start|><|image_pad|><|vision_end|>" if kind.startswith("qwen") else "<image>"
    first, second, third = picture(40, 31, seed=1), picture(60, 90, seed=2), picture(28, 28, seed=3)

    def one(text: str, *images: Any) -> Any:
        return {"prompt": text.replace("IMAGE", mark), "multi_modal_data": {"image": list(images)}} if images else text

    return [
        one("a picture IMAGE and what is in it?", first),
        one("a picture IMAGE and what is in it?", second),
        "no picture, and a dog",
        one("a picture IMAGE and what is in it? then IMAGE here", first, second),
        one("IMAGEIMAGE", third, third),
        one("a picture IMAGE and a fox", first),
        "The quick brown fox",
        one("two: IMAGE, IMAGE.", second, first),
    ]


def answers(folder: Path, kind: str, **settings: Any) -> list[list[list[int]]]:
    greedy = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    drawn = greedy.replace(temperature=1.0, seed=5, n=2)
    params = [drawn if i % 4 == 3 else greedy for i in range(8)]
    with LLM(str(folder), **BASE | settings) as llm:
        found = llm.generate(prompts(kind), params)
        again = llm.generate(prompts(kind)[::-1], params[::-1])[::-1]
        tokens = [[list(choice.token_ids) for choice in output.outputs] for output in found]
        assert tokens == [[list(choice.token_ids) for choice in output.outputs] for output in again]
        return tokens


@cache
def plain(folder: Path, kind: str) -> list[list[list[int]]]:
    """Each request alone, and without a cache of prefixes."""
    return answers(folder, kind, max_num_seqs=1, enable_prefix_caching=False)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("settings", SETTINGS)
def test_the_same_tokens(
    folders: dict[str, Path], kind: str, settings: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks_in_threads(monkeypatch)
    assert answers(folders[kind], kind, **SETTINGS[settings]) == plain(folders[kind], kind)
