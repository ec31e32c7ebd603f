"""Requests with images have the same tokens whatever else the engine does: chunks, cached prefixes, preemption, other
requests, ranks."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
from image_kit import make, picture
from media_kit import BASE, answers, answers_alone
from rank_kit import CONTEXTS, PIPELINE, TWO_RANKS, ranks_in_threads
from toy_models import behind

from octavo import LLM, SamplingParams
from octavo.core.errors import InvalidRequestError
from octavo.features.media.worker import MediaWorker, ShiftingWorker

SMALL = {"kv_cache_memory_bytes": 17 * 16}
"""17 blocks with a byte a token: one request of the longest, and little more."""
SETTINGS: dict[str, dict[str, Any]] = {
    "overlap": {"async_scheduling": True},
    "chunked prefill": {"max_num_batched_tokens": 8},
    "preemption": SMALL,
    "overlap + chunked prefill + preemption": {"async_scheduling": True, "max_num_batched_tokens": 8, **SMALL},
    "no prefix cache": {"enable_prefix_caching": False},
    "one image encoded at a time": {"mm_encoder_cache_gb": 0.0, "max_num_batched_tokens": 32},
    "torch attention": {"attention_backend": "torch", "device": "cpu"},
    "a process of its own": {"distributed_executor_backend": "mp"},
    "two ranks": TWO_RANKS,
    "two ranks, steps in parts": TWO_RANKS
    | {"attention_backend": "torch", "enable_dbo": True, "dbo_prefill_token_threshold": 32},
    "two stages": PIPELINE,
    "two ranks that divide prompts": CONTEXTS,
}
TOKEN_BYTES = {"smolvlm": 512, "qwen2.5-vl": 512, "qwen3-vl": 768, "qwen3.5": 1024, "gemma3": 512}
"""Kind of model -> bytes of a token in the KV cache; of a hybrid one, as its blocks are."""
RECURRENT = "qwen3.5"
"""Its decoder has recurrent layers."""
DIVIDED = ("two ranks, steps in parts", "two ranks that divide prompts")
"""Settings with which tokens of a step are computed apart."""
MARKS = {"smolvlm": "<image>", "gemma3": "<start_of_image>"}
_FEW = {"max_model_len": 128, "kv_cache_memory_bytes": 28 * 16}
OWN: dict[tuple[str, str], dict[str, Any]] = {
    ("chunked prefill", "gemma3"): {"max_num_batched_tokens": 20},
    ("preemption", "gemma3"): _FEW,
    ("overlap + chunked prefill + preemption", "gemma3"): {
        "async_scheduling": True,
        "max_num_batched_tokens": 20,
        **_FEW,
    },
}
"""What other settings a kind needs: a step has room for an image of Gemma's, of 16 tokens, and layers differ."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {kind: make(kind, tmp_path_factory.mktemp(kind)).folder for kind in TOKEN_BYTES}


def prompts(kind: str) -> list[Any]:
    """Some with images, which they share, as they share texts before and after them; some without."""
    mark = MARKS.get(kind, "<|vision_start|><|image_pad|><|vision_end|>")
    first, second, third = picture(40, 31, seed=1), picture(60, 90, seed=2), picture(28, 28, seed=3)

    # Tiles are many tokens; other images need as many of text, for too few blocks.
    more = "" if kind == "smolvlm" else " The quick brown fox jumps over the lazy dog." * 3

    def one(text: str, *images: Any) -> Any:
        text += more
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


@cache
def plain(folder: Path, kind: str, device: str) -> list[list[list[int]]]:
    return answers_alone(folder, prompts(kind), device)


QUICK = {
    ("overlap + chunked prefill + preemption", "qwen3-vl"),
    ("torch attention", "qwen3-vl"),
    ("two ranks, steps in parts", "qwen3-vl"),
    ("two stages", "qwen3-vl"),
    ("two ranks that divide prompts", "qwen3-vl"),
    ("overlap + chunked prefill + preemption", RECURRENT),
    ("torch attention", RECURRENT),
    ("preemption", "qwen2.5-vl"),
    ("overlap + chunked prefill + preemption", "smolvlm"),
    ("overlap + chunked prefill + preemption", "qwen2.5-vl"),
    ("one image encoded at a time", "smolvlm"),
    ("torch attention", "qwen2.5-vl"),
    ("two ranks", "smolvlm"),
    ("two stages", "qwen2.5-vl"),
    ("two ranks that divide prompts", "qwen2.5-vl"),
    ("overlap + chunked prefill + preemption", "gemma3"),
    ("two stages", "gemma3"),
}


@pytest.mark.parametrize(
    ("settings", "kind"),
    [
        pytest.param(settings, kind, marks=() if (settings, kind) in QUICK else pytest.mark.slow)
        for settings in SETTINGS
        for kind in TOKEN_BYTES
        if kind != RECURRENT or settings not in DIVIDED
    ],
)
def test_the_same_tokens(folders: dict[str, Path], settings: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks_in_threads(monkeypatch)
    chosen = dict(OWN.get((settings, kind), SETTINGS[settings]))
    expected = plain(folders[kind], kind, chosen.get("device", "auto"))
    if settings in DIVIDED:  # as on a GPU
        monkeypatch.setattr(ShiftingWorker, "variant", MediaWorker.variant)
    if "kv_cache_memory_bytes" in chosen:
        chosen["kv_cache_memory_bytes"] *= TOKEN_BYTES[kind]
    tokens, preempted = answers(folders[kind], prompts(kind), **chosen)
    assert tokens == expected
    assert preempted or settings != "preemption"


@pytest.mark.parametrize("kind", ["qwen2.5-vl", pytest.param("qwen3-vl", marks=pytest.mark.slow), RECURRENT])
def test_a_gpus_runner_replays_what_follows_an_image(
    kind: str, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Graphs read positions that an image has shifted. Without a GPU, in Triton's interpreter."""
    pytest.importorskip("triton")
    from toy_graphs import recorded_graphs

    asked = prompts("qwen2.5-vl")[0] | {"prompt": "<|image_pad|>?"}
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    with LLM(str(folders[kind]), **BASE | {"device": "cpu"}) as llm:
        expected = llm.generate([asked, "The"], params)
    replayed = recorded_graphs(monkeypatch)
    small = {"max_num_seqs": 2, "max_num_batched_tokens": 24}
    with LLM(str(folders[kind]), **BASE | behind(monkeypatch) | small) as llm:
        found = llm.generate([asked, "The"], params)
    assert [one.outputs[0].token_ids for one in found] == [one.outputs[0].token_ids for one in expected]
    assert replayed["forward"] > 1, "the tokens that follow"


def test_a_cached_prefix_that_ends_inside_an_image(folders: dict[str, Path]) -> None:
    """Its later tokens attend to the cached ones, whose states have seen all of the image."""
    asked = {"prompt": "a <start_of_image>?", "multi_modal_data": {"image": picture(40, 31)}}
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=3)
    with LLM(str(folders["gemma3"]), **BASE) as llm:
        first, second = (llm.generate(asked, params)[0] for _ in range(2))
    assert (
        first.prompt_token_ids.index(-1) < second.num_cached_tokens == 16 < first.prompt_token_ids[::-1].index(-1) + 16
    )
    assert first.outputs[0].token_ids == second.outputs[0].token_ids
    before, after = (output.outputs[0].logprobs[0] for output in (first, second))
    assert before.keys() == after.keys()
    for token, one in before.items():
        assert one.logprob == pytest.approx(after[token].logprob, abs=1e-4), "rounded elsewhere on a GPU"


def test_an_image_larger_than_a_step(folders: dict[str, Path]) -> None:
    asked = {"prompt": "a <start_of_image>?", "multi_modal_data": {"image": picture(40, 31)}}
    with (
        LLM(str(folders["gemma3"]), **BASE, max_num_batched_tokens=15) as llm,
        pytest.raises(InvalidRequestError, match=r"16 tokens that must be computed in one step.*at most 15"),
    ):
        llm.generate(asked)
