"""Requests with videos have the same tokens whatever else the engine does: chunks, cached prefixes, preemption, other
requests, ranks."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
from image_kit import picture
from media_kit import BASE, answers, answers_alone
from rank_kit import CONTEXTS, PIPELINE, TWO_RANKS, ranks_in_threads
from video_kit import CASES, film, make

from octavo import LLM, SamplingParams
from octavo.features.media.worker import MediaWorker, ShiftingWorker

SMALL = {"kv_cache_memory_bytes": 17 * 16}
"""17 blocks with a byte a token: one request of the longest, and little more."""
SETTINGS: dict[str, dict[str, Any]] = {
    "chunked prefill": {"max_num_batched_tokens": 8},
    "preemption": SMALL,
    "overlap + chunked prefill + preemption": {"async_scheduling": True, "max_num_batched_tokens": 8, **SMALL},
    "one item encoded at a time": {"mm_encoder_cache_gb": 0.0, "max_num_batched_tokens": 16},
    "a process of its own": {"distributed_executor_backend": "mp"},
    "two ranks": TWO_RANKS,
    "two stages": PIPELINE,
    "two ranks that divide prompts": CONTEXTS,
}
TOKEN_BYTES = {"qwen2.5-vl": 512, "qwen3-vl": 768, "llava-onevision": 512}
DIVIDED = ("two ranks that divide prompts",)
IMAGES = {"llava-onevision": "<image>"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {kind: make(kind, tmp_path_factory.mktemp(kind)).folder for kind in TOKEN_BYTES}


def prompts(kind: str) -> list[Any]:
    """Videos that share their beginnings, or come at another rate; images; text alone."""
    place = CASES[kind].place
    image = IMAGES.get(kind, "<|vision_start|><|image_pad|><|vision_end|>")
    first, other, still = film(10, 40, 31, seed=1), film(6, 60, 50, seed=2), picture(40, 31, seed=3)

    def one(text: str, *videos: Any, images: Any = ()) -> Any:
        text += " The quick brown fox jumps over the lazy dog." * 3
        data = {"video": list(videos), "image": list(images)}
        return {"prompt": text.replace("VIDEO", place).replace("IMAGE", image), "multi_modal_data": data}

    return [
        one("a film VIDEO and what is in it?", (first, {"fps": 2.0})),
        one("a film VIDEO and what is in it?", (first[:8], {"fps": 2.0})),
        one("a film VIDEO and what is in it?", (first, {"fps": 0.7, "do_sample_frames": False})),
        "no film, and a dog",
        one("IMAGE and VIDEO", other, images=[still]),
        one("VIDEOVIDEO", other[:3], other[:3]),
        "The quick brown fox",
    ]


@cache
def plain(folder: Path, kind: str, device: str) -> list[list[list[int]]]:
    return answers_alone(folder, prompts(kind), device)


QUICK = {
    ("preemption", "qwen2.5-vl"),
    ("overlap + chunked prefill + preemption", "qwen2.5-vl"),
    ("overlap + chunked prefill + preemption", "qwen3-vl"),
    ("one item encoded at a time", "qwen2.5-vl"),
    ("one item encoded at a time", "llava-onevision"),
    ("two stages", "qwen3-vl"),
    ("two ranks that divide prompts", "qwen2.5-vl"),
}


@pytest.mark.parametrize(
    ("settings", "kind"),
    [
        pytest.param(settings, kind, marks=() if (settings, kind) in QUICK else pytest.mark.slow)
        for settings in SETTINGS
        for kind in TOKEN_BYTES
    ],
)
def test_the_same_tokens(folders: dict[str, Path], settings: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks_in_threads(monkeypatch)
    chosen = dict(SETTINGS[settings])
    expected = plain(folders[kind], kind, chosen.get("device", "auto"))
    if settings in DIVIDED:  # as on a GPU
        monkeypatch.setattr(ShiftingWorker, "variant", MediaWorker.variant)
    if "kv_cache_memory_bytes" in chosen:
        chosen["kv_cache_memory_bytes"] *= TOKEN_BYTES[kind]
    tokens, preempted = answers(folders[kind], prompts(kind), **chosen)
    assert tokens == expected
    assert preempted or settings != "preemption"


def test_what_comes_again_is_not_encoded_again(folders: dict[str, Path]) -> None:
    """Neither the frames that a video shares with another, nor at another rate, where the prefix cache has nothing."""
    params = SamplingParams(temperature=0, max_tokens=4)
    frames = film(10, 40, 31, seed=1)
    place = CASES["qwen2.5-vl"].place

    def asked(count: int, fps: float) -> Any:
        known = {"fps": fps, "do_sample_frames": False}
        return {"prompt": f"{place}?", "multi_modal_data": {"video": (frames[:count], known)}}

    def number(llm: LLM, name: str) -> int:
        return next(int(one.value) for one in llm.get_metrics() if one.name.endswith(name))

    with LLM(str(folders["qwen2.5-vl"]), **BASE) as llm:
        llm.generate(asked(10, 2.0), params)
        encoded = number(llm, "images_encoded")
        (again,) = llm.generate(asked(10, 2.0), params)
        assert again.num_cached_tokens > 0
        (slower,) = llm.generate(asked(10, 0.5), params)
        assert slower.num_cached_tokens == 0
        assert number(llm, "images_encoded") == encoded
        llm.generate(asked(8, 2.0), params)
        assert number(llm, "images_encoded") <= encoded + 1
