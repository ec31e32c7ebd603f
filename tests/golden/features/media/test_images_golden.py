"""Models with images answer as Transformers does, from pixels and prompt to tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from image_kit import Made, cases, data_url, make, picture

from octavo import LLM, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=5)
SETTINGS: dict[str, Any] = {"dtype": "float32", "kv_cache_memory_bytes": 4 << 20, "threads": 1, "max_model_len": 512}
PROMPTS = {
    "one": ("look: IMAGE what is it?", [(40, 31)]),
    "wide": ("IMAGE\nand?", [(90, 30)]),
    "several": ("a\nIMAGE\nb IMAGE c IMAGE", [(30, 60), (28, 28), (64, 61)]),
}


ALIKE = {"llava-siglip", "idefics3", "internvl-norms", "pixtral", "qwen2-vl", "qwen3.5-moe"}


@pytest.fixture(
    scope="module", params=[pytest.param(name, marks=pytest.mark.slow) if name in ALIKE else name for name in cases()]
)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    return make(request.param, tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def llm(made: Made) -> Iterator[LLM]:
    with LLM(str(made.folder), **SETTINGS) as one:
        yield one


def test_greedy_tokens_and_probabilities(made: Made, llm: LLM) -> None:
    for number, (text, sizes) in enumerate(PROMPTS.values()):
        images = [picture(*size, seed=number + i) for i, size in enumerate(sizes)]
        tokens, expected = made.generated(text, images, 8)
        (output,) = llm.generate({"prompt": made.prompt(text), "multi_modal_data": {"image": images}}, GREEDY)
        assert len(output.prompt_token_ids) == len(tokens)
        assert [a for a in output.prompt_token_ids if a != -1] == [
            token for token, ours in zip(tokens, output.prompt_token_ids, strict=True) if ours != -1
        ]
        assert output.outputs[0].token_ids == expected
        theirs = torch.log_softmax(made.logits(text, images), -1)
        ours = output.outputs[0].logprobs[0]
        assert {token: one.logprob for token, one in ours.items()} == pytest.approx(
            {token: theirs[token].item() for token in ours}, abs=2e-3
        )


def test_a_chat_renders_images_where_the_template_has_them(made: Made, llm: LLM) -> None:
    image = picture(33, 47)
    parts = [{"type": "text", "text": "see "}, {"type": "image_url", "image_url": {"url": data_url(image)}}]
    (chat,) = llm.chat([{"role": "user", "content": [*parts, {"type": "text", "text": "?"}]}], GREEDY)
    text = "<s>user: see IMAGE?</s><s>assistant: "
    assert chat.outputs[0].token_ids == made.generated(text, [image], 8)[1]
