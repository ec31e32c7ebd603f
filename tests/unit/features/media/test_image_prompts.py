"""What the text half makes of prompts with images, and what it refuses."""

from __future__ import annotations

import sys
from typing import Any

import msgspec
import numpy as np
import pytest
from image_kit import TEMPLATE, cases, data_url, picture, token, tokenizer
from test_image_processors import config_of

from octavo.core.errors import ConfigError, InvalidRequestError
from octavo.core.params import SamplingParams
from octavo.core.request import PLACEHOLDER, GenerateRequest
from octavo.engine.fake import fake_info
from octavo.features.media.payload import NAME, MediaInfo, MediaItem
from octavo.features.media.settings import MediaSettings
from octavo.text.chat.template import ChatTemplate
from octavo.text.prompts.message_parts import taken
from octavo.text.prompts.prepare import Preparer
from octavo.text.tokenizers.tokenizer import Tokenizer

WORDS = Tokenizer(tokenizer(), named_tokens={"bos_token": "<s>"})
IMAGE = picture(40, 31)
PARAMS = SamplingParams(max_tokens=4)


def preparer(name: str = "llava", **more: Any) -> Preparer:
    own = MediaInfo(
        **{
            "config": config_of(name),
            "processor": dict(cases()[name].images.to_dict()),
            "limit": 2,
            "timeout_s": 1.0,
            "max_bytes": 10**6,
            "max_pixels": 10**5,
        }
        | more
    )
    facts = {NAME: msgspec.Raw(msgspec.msgpack.encode(own))}
    return Preparer(WORDS, fake_info(features=[NAME], feature_info=facts, vocab_size=600))


def given(images: Any, text: str = "see <image> now", **more: Any) -> Any:
    return {"prompt": text, "multi_modal_data": {"image": images}, **more}


def items_of(request: GenerateRequest) -> list[MediaItem]:
    return msgspec.msgpack.decode(request.options[NAME], type=list[MediaItem])


def refusal(one: Preparer, prompt: Any, params: SamplingParams = PARAMS, **options: Any) -> InvalidRequestError:
    with pytest.raises(InvalidRequestError) as caught:
        one.prepare(prompt, params, **options)
    return caught.value


def chat(one: Preparer, messages: list[Any], template: str, **options: Any) -> GenerateRequest:
    plain, parts = taken(messages)
    assert parts is not None
    one.check_parts(parts)
    text = ChatTemplate(template, WORDS).render(plain, shown=parts.shown, **options)
    return one.prepare(parts.prompt(text), PARAMS, add_special_tokens=False, param="messages").request


def user(*parts: Any) -> list[Any]:
    texts = [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
    return [{"role": "user", "content": texts}]


PART = {"type": "image_url", "image_url": {"url": data_url(IMAGE)}}


def test_placeholders_and_keys() -> None:
    request = preparer().prepare(given([IMAGE, IMAGE], "a <image> b <image>"), PARAMS).request
    first, second = items_of(request)
    assert first.digest == second.digest
    assert (first.shape, first.count, len(first.data)) == ((1, 28, 28, 3), 16, 28 * 28 * 3)
    for item in (first, second):
        ((start, begin, count),) = item.runs
        assert (begin, count) == (0, 16)
        assert request.tokens[start : start + 16] == [PLACEHOLDER] * 16
        assert request.keys[start : start + 16] == [item.digest + i.to_bytes(4, "little") for i in range(16)]
    texts = [token for token in request.tokens if token != PLACEHOLDER]
    assert texts == WORDS.encode("a ") + WORDS.encode(" b ")
    assert [key for key in request.keys if isinstance(key, int)] == texts


def test_other_pixels_are_other_keys() -> None:
    digests = {
        items_of(preparer().prepare(given(image), PARAMS).request)[0].digest
        for image in (IMAGE, picture(40, 31, seed=1), IMAGE.rotate(180), IMAGE)
    }
    assert len(digests) == 3


def test_forms_of_an_image() -> None:
    forms = [
        {"type": "image", "image": IMAGE},
        {"type": "image_pil", "image_pil": IMAGE},
        {"type": "image", "image": np.asarray(IMAGE)},
        {"type": "image", "image": data_url(IMAGE)},
        {"type": "image", "url": data_url(IMAGE)},
        {"type": "image_url", "image_url": data_url(IMAGE)},
        {"type": "input_image", "image_url": data_url(IMAGE), "detail": "high"},
        PART,
    ]
    found = {
        items_of(chat(preparer(), user("a ", form), TEMPLATE.replace("IMAGE", "<image>")))[0].digest for form in forms
    }
    assert len(found) == 1


def test_templates_that_know_images_place_them() -> None:
    request = chat(preparer(), user("a ", PART, "b"), TEMPLATE.replace("IMAGE", "<image>"))
    before = [WORDS.special.tokens["<s>"], *WORDS.encode("user: a ", add_special_tokens=False)]
    assert request.tokens[: len(before) + 17] == [*before, *[PLACEHOLDER] * 16, *WORDS.encode_after("b")]


def test_templates_of_texts_get_images_in_their_places() -> None:
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    request = chat(preparer("qwen2-vl"), user("a", PART, "b"), template)
    count = items_of(request)[0].count
    around = [token("<|vision_start|>"), *[PLACEHOLDER] * count, token("<|vision_end|>")]
    assert request.tokens == [*WORDS.encode("a\n"), *around, *WORDS.encode_after("\nb")]


def test_a_mark_of_an_image_in_a_text_is_text() -> None:
    request = chat(preparer(), user("<image> ", PART), TEMPLATE.replace("IMAGE", "<image>"))
    assert len(items_of(request)) == 1
    assert request.tokens.index(PLACEHOLDER) > len(WORDS.encode("<s>user: ", add_special_tokens=False)) + 1


def test_a_template_that_drops_an_image_is_named() -> None:
    with pytest.raises(InvalidRequestError, match=r"leaves messages.0.content.1.image_url out of the prompt"):
        chat(
            preparer(),
            user("a", PART),
            "{% for m in messages %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}",
        )


@pytest.mark.parametrize(
    ("prompt", "says"),
    [
        (given([]), "has 1 places of images ('<image>'), and multi_modal_data has 0"),
        (given([IMAGE] * 2), "has 1 places of images"),
        (given([IMAGE] * 3, "<image>" * 3), "At most 2 image(s)"),
        (given("a.png"), "must be a URL that begins with data:"),
        (given(5), "multi_modal_data.image.0 must be a PIL image"),
        (given(np.zeros((3, 4), np.uint8)), "must be an array [height, width, 3] of uint8, got [3, 4]"),
        (given(IMAGE.resize((400, 400))), "has 400 x 400 pixels; images may have 100,000"),
        ({"prompt": "a", "multi_modal_data": {"audio": [1]}}, "has 'audio'; this model reads images only"),
        ({"prompt": "a", "multi_modal_data": [IMAGE]}, "must be an object such as"),
        (given(IMAGE, mm_processor_kwargs={"a": 1}), "mm_processor_kwargs.a has no effect here"),
        (given(IMAGE, mm_processor_kwargs={"fps": 1}), "mm_processor_kwargs has no effect: the prompt has no video"),
        (given(IMAGE, other=1), "'other' is not supported"),
        ({"multi_modal_data": {"image": IMAGE}}, "must have 'prompt' or 'prompt_token_ids'"),
        (given(IMAGE, "<image>" + " a" * 1100), "maximum context length"),
    ],
)
def test_what_is_refused(prompt: Any, says: str) -> None:
    assert says in refusal(preparer(), prompt).message


def test_what_images_can_not_be_combined_with() -> None:
    assert "truncate_prompt_tokens" in refusal(preparer(), given(IMAGE), truncate=5).message
    assert "prompt_logprobs" in refusal(preparer(), given(IMAGE), PARAMS.replace(prompt_logprobs=1)).message


def test_models_without_images() -> None:
    plain = Preparer(WORDS, fake_info(vocab_size=600))
    assert "this model takes only text" in refusal(plain, given(IMAGE)).message
    with pytest.raises(
        InvalidRequestError, match=r"messages.0.content.1 is of type 'image_url', but this model reads only"
    ):
        chat(plain, user("a", PART), TEMPLATE)
    other = preparer(refused="images of X are not supported: its tower is not")
    assert "X are not supported: its tower is not" in refusal(other, given(IMAGE)).message
    with pytest.raises(InvalidRequestError, match=r"messages.0.content.1.image_url can't be read: images of X"):
        chat(other, user("a", PART), TEMPLATE)


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("input_audio", "is audio, and this model reads images"),
        ("audio_url", "is audio, and this model reads images"),
        ("video_url", "is video, and this model reads images"),
        ("video", "is video, and this model reads images"),
    ],
)
def test_sound_and_films_are_refused(kind: str, says: str) -> None:
    with pytest.raises(InvalidRequestError, match=says):
        chat(preparer(), user("a", {"type": kind, kind: {"url": "x"}}), TEMPLATE)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"limit_mm_per_prompt": {"image": -1}}, "must be a whole number, 0 or more"),
        ({"limit_mm_per_prompt": {"images": 1}}, "has 'images'; its keys are image"),
        ({"limit_mm_per_prompt": {"video": True}}, "must be a whole number, 0 or more"),
        ({"max_video_bytes": 0}, "--max-video-bytes 0 must be at least 1"),
        ({"max_video_frames": 0}, "--max-video-frames 0 must be at least 1"),
        ({"max_video_pixels": 0}, "--max-video-pixels 0 must be at least 1"),
        ({"max_video_seconds": 0.0}, "--max-video-seconds 0 must be more than 0"),
        ({"video_fetch_timeout": 0.0}, "--video-fetch-timeout 0 must be more than 0"),
        ({"max_image_pixels": 0}, "--max-image-pixels 0 must be from 1"),
        ({"max_image_bytes": 0}, "--max-image-bytes"),
        ({"image_fetch_timeout": 0.0}, "--image-fetch-timeout 0 must be more than 0"),
        ({"max_audio_bytes": 0}, "--max-audio-bytes 0 must be at least 1"),
        ({"max_audio_seconds": 0.0}, "--max-audio-seconds 0 must be more than 0"),
        ({"audio_fetch_timeout": 0.0}, "--audio-fetch-timeout 0 must be more than 0"),
        ({"mm_encoder_cache_gb": -1.0}, "--mm-encoder-cache-gb -1 must be 0 or more"),
        ({"allowed_local_media_path": "/no/such"}, "is not a folder"),
    ],
)
def test_settings_out_of_range(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        MediaSettings(**changes)


def test_limits() -> None:
    assert MediaSettings().limit_of("image") == 999
    both = MediaSettings(limit_mm_per_prompt={"image": 4, "audio": 1, "video": 0})
    assert (both.limit_of("image"), both.limit_of("audio")) == (4, 1)
    assert MediaSettings().limit_of("video") == 999
    assert MediaSettings(limit_mm_per_prompt={"image": 0}).limit_of("video") == 0
    assert MediaSettings(limit_mm_per_prompt={"image": 0, "video": 2}).limit_of("video") == 2
    assert MediaSettings(limit_mm_per_prompt={"image": {"count": 2, "width": 5}}).limit_of("image") == 2


def test_nothing_is_imported_before_an_image_comes() -> None:
    import subprocess

    code = "import sys, octavo.features.media.text, octavo.features.media.kinds\nprint('PIL' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


PUBLISHED = {
    "qwen2.5-vl": (
        "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{% if message['content'] is string %}"
        "{{ message['content'] }}<|im_end|>\n{% else %}{% for content in message['content'] %}{% if content['type'] == "
        "'image' or 'image' in content or 'image_url' in content %}<|vision_start|><|image_pad|><|vision_end|>"
        "{% elif 'text' in content %}{{ content['text'] }}{% endif %}{% endfor %}<|im_end|>\n{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
        "<|im_start|>user\nsee <|vision_start|><|image_pad|><|vision_end|>?<|im_end|>\n<|im_start|>assistant\n",
    ),
    "smolvlm": (
        "<|im_start|>{% for message in messages %}{{message['role'] | capitalize}}"
        "{% if message['content'][0]['type'] == 'image' %}{{':'}}{% else %}{{': '}}{% endif %}"
        "{% for line in message['content'] %}{% if line['type'] == 'text' %}{{line['text']}}"
        "{% elif line['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}<end_of_utterance>\n"
        "{% endfor %}{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}",
        "<|im_start|>User: see <image>?<end_of_utterance>\nAssistant:",
    ),
    "llava": (
        "{% for message in messages %}{% if message['role'] != 'system' %}{{ message['role'].upper() + ': '}}"
        "{% endif %}{% for content in message['content'] | selectattr('type', 'equalto', 'image') %}{{ '<image>\n' }}"
        "{% endfor %}{% for content in message['content'] | selectattr('type', 'equalto', 'text') %}"
        "{{ content['text'] + ' '}}{% endfor %}{% endfor %}{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}",
        "USER: <image>\nsee  ? ASSISTANT:",
    ),
}
"""Chat templates in the forms that checkpoints have, and what they write."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_templates(name: str) -> None:
    template, expected = PUBLISHED[name]
    plain, parts = taken(user("see ", PART, "?"))
    assert parts is not None
    compiled = ChatTemplate(template, WORDS)
    assert compiled.render(plain, shown=parts.shown) == expected
    request = chat(preparer(name), user("see ", PART, "?"), template)
    assert len({item.digest for item in items_of(request)}) >= 1
    alone = compiled.render([{"role": "user", "content": "only text"}])
    assert "only text" in alone
