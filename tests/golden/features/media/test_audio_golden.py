"""Models with audio answer as Transformers does, from samples and prompt to tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from audio_kit import RATE, Made, cases, data_url, make, sound

from octavo import LLM, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=5)
SETTINGS: dict[str, Any] = {"dtype": "float32", "kv_cache_memory_bytes": 4 << 20, "threads": 1, "max_model_len": 512}
PROMPTS = {
    "one": ("hear: AUDIO what is it?", [0.71]),
    "whole windows": ("AUDIO\nand?", [1.0]),
    "short": ("a AUDIO", [0.08]),
    "several": ("a AUDIO b AUDIO c AUDIO", [0.5, 0.9999, 0.9876]),
    "as long": ("a AUDIO b AUDIO", [0.9876, 0.9876]),
}
LONG = {"audio-flamingo-3": [3.27, 2.0, 1.01], "qwen3-asr": [5.27, 4.0, 2.005, 3.0]}
"""Seconds of several windows."""


@pytest.fixture(scope="module", params=list(cases()))
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    return make(request.param, tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def llm(made: Made) -> Iterator[LLM]:
    with LLM(str(made.folder), **SETTINGS) as one:
        yield one


def test_greedy_tokens_and_probabilities(made: Made, llm: LLM) -> None:
    name = next(name for name, case in cases().items() if case.name == made.case.name)
    long = {f"{seconds} s": ("x AUDIO y", [seconds]) for seconds in LONG.get(name, [])}
    asked = PROMPTS | long
    if name == "qwen3-asr":  # Transformers pads several to the longest, which changes the ends of the others
        del asked["several"]
    for number, (text, lengths) in enumerate(asked.values()):
        sounds = [sound(seconds, seed=number + i) for i, seconds in enumerate(lengths)]
        tokens, expected = made.generated(text, sounds, 8)
        given = [(one, RATE) for one in sounds]
        (output,) = llm.generate({"prompt": made.prompt(text), "multi_modal_data": {"audio": given}}, GREEDY)
        assert len(output.prompt_token_ids) == len(tokens), lengths
        assert [a for a in output.prompt_token_ids if a != -1] == [
            token for token, ours in zip(tokens, output.prompt_token_ids, strict=True) if ours != -1
        ]
        theirs = torch.log_softmax(made.logits(text, sounds), -1)
        ours = output.outputs[0].logprobs[0]
        assert {token: one.logprob for token, one in ours.items()} == pytest.approx(
            {token: theirs[token].item() for token in ours}, abs=2e-3
        ), lengths
        assert output.outputs[0].token_ids == expected


def test_a_chat_renders_audio_where_the_template_has_it(made: Made, llm: LLM) -> None:
    samples = sound(0.6)
    parts = [{"type": "text", "text": "hear "}, {"type": "audio_url", "audio_url": {"url": data_url(samples)}}]
    (chat,) = llm.chat([{"role": "user", "content": [*parts, {"type": "text", "text": "?"}]}], GREEDY)
    text = "<s>user: hear AUDIO?</s><s>assistant: "
    assert chat.outputs[0].token_ids == made.generated(text, [samples], 8)[1]
