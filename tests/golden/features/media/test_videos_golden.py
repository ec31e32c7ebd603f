"""Models with videos answer as Transformers does, from frames and prompt to tokens."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from image_kit import picture
from video_kit import CASES, Made, film, make

from octavo import LLM, SamplingParams
from octavo.core.errors import InvalidRequestError

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=5)
SETTINGS: dict[str, Any] = {"dtype": "float32", "kv_cache_memory_bytes": 4 << 20, "threads": 1, "max_model_len": 768}
PROMPTS: dict[str, tuple[str, list[tuple[int, int, int]], float, dict[str, Any]]] = {
    "two frames per second": ("look: VIDEO what is it?", [(13, 40, 31)], 4.0, {"fps": 2.0}),
    "some frames": ("VIDEO\nand?", [(12, 90, 30)], 3.0, {"num_frames": 4}),
    "several": ("a\nVIDEO\nb VIDEO c", [(9, 30, 60), (9, 30, 60)], 3.0, {"fps": 1.5}),
    "long": ("VIDEO!", [(60, 33, 30)], 2.0, {"fps": 0.4}),
}
"""Text, (frames, width, height) of each video, their frames per second, and what is asked for."""
ALIKE = {"qwen3-vl-moe", "qwen3.5-moe"}


@pytest.fixture(
    scope="module", params=[pytest.param(name, marks=pytest.mark.slow) if name in ALIKE else name for name in CASES]
)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    return make(request.param, tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def llm(made: Made) -> Iterator[LLM]:
    with LLM(str(made.folder), **SETTINGS) as one:
        yield one


def test_greedy_tokens_and_probabilities(made: Made, llm: LLM) -> None:
    for number, (text, sizes, fps, sampling) in enumerate(PROMPTS.values()):
        videos = [film(*size, seed=number + i) for i, size in enumerate(sizes)]
        tokens, expected, theirs = made.generated(text, videos, fps, sampling, 8)
        asked: Any = {
            "prompt": made.prompt(text),
            "multi_modal_data": {"video": [(one, {"fps": fps}) for one in videos]},
            "mm_processor_kwargs": sampling,
        }
        (output,) = llm.generate(asked, GREEDY)
        assert len(output.prompt_token_ids) == len(tokens)
        assert [a for a in output.prompt_token_ids if a != -1] == [
            token for token, ours in zip(tokens, output.prompt_token_ids, strict=True) if ours != -1
        ]
        assert output.outputs[0].token_ids == expected
        ours = output.outputs[0].logprobs[0]
        assert {token: one.logprob for token, one in ours.items()} == pytest.approx(
            {token: theirs[token].item() for token in ours}, abs=2e-3
        )


def test_videos_without_images(tmp_path: Path) -> None:
    made = make("qwen3-vl", tmp_path)
    asked: Any = {"prompt": made.prompt("VIDEO?"), "multi_modal_data": {"video": (film(8, 40, 31), {"fps": 2.0})}}
    with LLM(str(tmp_path), **SETTINGS, limit_mm_per_prompt={"image": 0, "video": 1}) as llm:
        assert len(llm.generate(asked, GREEDY)[0].outputs[0].token_ids) == 8
        image: Any = {"prompt": "<|image_pad|>", "multi_modal_data": {"image": picture(30, 30)}}
        with pytest.raises(InvalidRequestError, match="image=0"):
            llm.generate(image, GREEDY)
    text_only = LLM(str(tmp_path), **SETTINGS, limit_mm_per_prompt={"image": 0})
    with text_only as llm, pytest.raises(InvalidRequestError, match="image=0"):
        llm.generate(asked, GREEDY)


def test_a_chat_renders_videos_where_the_template_has_them(made: Made, llm: LLM) -> None:
    frames = film(11, 33, 47)
    parts: list[Any] = [{"type": "text", "text": "see "}, {"type": "video", "video": (frames, {"fps": 3.0})}]
    messages = [{"role": "user", "content": [*parts, {"type": "text", "text": "?"}]}]
    (chat,) = llm.chat(messages, GREEDY, mm_processor_kwargs={"num_frames": 6})
    text = "<s>user: see VIDEO?</s><s>assistant: "
    tokens, expected, _ = made.generated(text, [frames], 3.0, {"num_frames": 6}, 8)
    assert len(chat.prompt_token_ids) == len(tokens)
    assert chat.outputs[0].token_ids == expected
