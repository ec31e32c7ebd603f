"""Requests with audio have the same tokens whatever else the engine does: chunks, cached prefixes, preemption, other
requests, ranks."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
from audio_kit import RATE, cases, make, sound
from media_kit import BASE, answers, answers_alone
from rank_kit import PIPELINE, TWO_RANKS, ranks_in_threads

from octavo import LLM, SamplingParams

SMALL = {"kv_cache_memory_bytes": 17 * 16 * 512}
"""Bytes of 17 blocks: one request of the longest, and little more."""
SETTINGS: dict[str, dict[str, Any]] = {
    "overlap": {"async_scheduling": True},
    "chunked prefill": {"max_num_batched_tokens": 8},
    "preemption": SMALL,
    "overlap + chunked prefill + preemption": {"async_scheduling": True, "max_num_batched_tokens": 8, **SMALL},
    "no prefix cache": {"enable_prefix_caching": False},
    "one window encoded at a time": {"mm_encoder_cache_gb": 0.0, "max_num_batched_tokens": 32},
    "a process of its own": {"distributed_executor_backend": "mp"},
    "two ranks": TWO_RANKS,
    "two stages": PIPELINE,
}
KINDS = ("audio-flamingo-3", "qwen3-asr")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {kind: make(kind, tmp_path_factory.mktemp(kind)).folder for kind in KINDS}


def prompts(kind: str) -> list[Any]:
    """Some with audio, of several windows, which they share, as they share texts before and after; some without."""
    mark = cases()[kind].place
    first, second, third = (sound(seconds, seed=seed) for seed, seconds in enumerate((2.6, 3.1, 0.7)))
    more = " The quick brown fox jumps over the lazy dog." * 2

    def one(text: str, *sounds: Any) -> Any:
        text += more
        given = [(samples, RATE) for samples in sounds]
        return {"prompt": text.replace("AUDIO", mark), "multi_modal_data": {"audio": given}} if sounds else text

    return [
        one("some AUDIO and what is said?", first),
        one("some AUDIO and what is said?", second),
        "no sound, and a dog",
        one("some AUDIO and what is said? then AUDIO here", first, third),
        one("AUDIOAUDIO", third, third),
        one("some AUDIO and a fox", first),
        "The quick brown fox",
        one("two: AUDIO, AUDIO.", third, first),
    ]


@cache
def plain(folder: Path, kind: str, device: str) -> list[list[list[int]]]:
    return answers_alone(folder, prompts(kind), device)


QUICK = {
    ("preemption", "audio-flamingo-3"),
    ("overlap + chunked prefill + preemption", "qwen3-asr"),
    ("one window encoded at a time", "audio-flamingo-3"),
    ("two ranks", "qwen3-asr"),
}


@pytest.mark.parametrize(
    ("settings", "kind"),
    [
        pytest.param(settings, kind, marks=() if (settings, kind) in QUICK else pytest.mark.slow)
        for settings in SETTINGS
        for kind in KINDS
    ],
)
def test_the_same_tokens(folders: dict[str, Path], settings: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks_in_threads(monkeypatch)
    chosen = SETTINGS[settings]
    tokens, preempted = answers(folders[kind], prompts(kind), **chosen)
    assert tokens == plain(folders[kind], kind, chosen.get("device", "auto"))
    assert preempted or settings != "preemption"


@pytest.mark.slow
def test_a_gpus_runner_replays_what_follows_audio(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU, in Triton's interpreter."""
    pytest.importorskip("triton")
    from toy_graphs import recorded_graphs
    from toy_models import behind

    asked = {"prompt": cases()["qwen3-asr"].place + "?", "multi_modal_data": {"audio": (sound(0.9), RATE)}}
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    with LLM(str(folders["qwen3-asr"]), **BASE | {"device": "cpu"}) as llm:
        expected = llm.generate([asked, "The"], params)
    replayed = recorded_graphs(monkeypatch)
    small = {"max_num_seqs": 2, "max_num_batched_tokens": 24}
    with LLM(str(folders["qwen3-asr"]), **BASE | behind(monkeypatch) | small) as llm:
        found = llm.generate([asked, "The"], params)
    assert [one.outputs[0].token_ids for one in found] == [one.outputs[0].token_ids for one in expected]
    assert replayed["forward"] > 1, "the tokens that follow"
