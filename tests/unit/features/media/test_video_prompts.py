"""What the text half makes of prompts with videos, and what it refuses."""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec
import numpy as np
import pytest
from image_kit import cases, picture, token, tokenizer
from image_kit import data_url as image_url
from media_kit import TEMPLATE
from test_image_processors import config_of
from video_kit import CASES, data_url, film, jpegs, mp4

from octavo.core.errors import InvalidRequestError, UnsupportedError
from octavo.core.params import SamplingParams
from octavo.core.request import PLACEHOLDER, GenerateRequest
from octavo.engine.fake import fake_info
from octavo.features.media.payload import NAME, MediaInfo, MediaItem
from octavo.text.chat.template import ChatTemplate
from octavo.text.prompts.message_parts import taken
from octavo.text.prompts.prepare import Preparer
from octavo.text.tokenizers.tokenizer import Tokenizer

WORDS = Tokenizer(tokenizer(), named_tokens={"bos_token": "<s>"})
FILM = film(8, 40, 32)
PARAMS = SamplingParams(max_tokens=4)
VIDEO = {"type": "video_url", "video_url": {"url": jpegs(FILM)}}
PLACE = "{% elif part.type == 'video' %}<|vision_start|><|video_pad|><|vision_end|>{% else %}{{ part.text }}"
QWEN = TEMPLATE.replace("IMAGE", "<|image_pad|>").replace("{% else %}{{ part.text }}", PLACE)


def info(name: str = "qwen2.5-vl", **video: Any) -> MediaInfo:
    config = config_of(name)
    stated = {
        "limit": 2,
        "timeout_s": 1.0,
        "max_bytes": 10**7,
        "max_pixels": 10**7,
        "max_frame_pixels": 10**6,
        "max_seconds": 60.0,
        "max_frames": 100,
    }
    videos = MediaInfo(modality="video", config=config, processor=CASES[name].stated, **(stated | video))
    return MediaInfo(config=config, processor=dict(cases()[name].images.to_dict()), video=videos, **stated)


def preparer(own: MediaInfo | None = None, words: Tokenizer = WORDS, **more: Any) -> Preparer:
    facts = {NAME: msgspec.Raw(msgspec.msgpack.encode(own or info()))}
    return Preparer(words, fake_info(**{"features": [NAME], "feature_info": facts, "vocab_size": 600} | more))


ONE = preparer()


def given(videos: Any, text: str = "see <|video_pad|> now", **more: Any) -> Any:
    return {"prompt": text, "multi_modal_data": {"video": videos}, **more}


def items_of(request: GenerateRequest) -> list[MediaItem]:
    return msgspec.msgpack.decode(request.options[NAME], type=list[MediaItem])


def refusal(one: Preparer, prompt: Any, **options: Any) -> InvalidRequestError:
    with pytest.raises(InvalidRequestError) as caught:
        one.prepare(prompt, PARAMS, **options)
    return caught.value


def chat(one: Preparer, parts: list[Any], template: str = QWEN) -> GenerateRequest:
    texts = [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
    plain, found = taken([{"role": "user", "content": texts}])
    assert found is not None
    one.check_parts(found)
    text = ChatTemplate(template, one.tokenizer).render(plain, shown=found.shown)
    return one.prepare(found.prompt(text), PARAMS, add_special_tokens=False, param="messages").request


def test_placeholders_and_keys() -> None:
    request = ONE.prepare(given(FILM), PARAMS).request
    items = items_of(request)
    assert sum(item.count for item in items) == request.tokens.count(PLACEHOLDER)
    assert sum(item.shape[0] for item in items) == 8
    assert [token for token in request.tokens if token != PLACEHOLDER] == WORDS.encode("see ") + WORDS.encode(" now")
    keys = [key for key in request.keys if isinstance(key, bytes)]
    assert len(keys) == len(set(keys)) == request.tokens.count(PLACEHOLDER)


def test_other_times_are_other_keys_of_the_same_items() -> None:
    """Equal frames are encoded once; their states depend on their positions."""
    slow, fast, again = (
        ONE.prepare(given((FILM, {"fps": fps, "do_sample_frames": False})), PARAMS).request for fps in (1.0, 4.0, 1.0)
    )
    assert [item.digest for item in items_of(slow)] == [item.digest for item in items_of(fast)]
    assert slow.keys == again.keys
    assert sum(one != other for one, other in zip(slow.keys, fast.keys, strict=True)) > 0


def test_forms_of_a_video() -> None:
    frames = list(FILM)
    forms = [
        {"type": "video", "video": FILM},
        {"type": "video", "video": frames},
        {"type": "video", "video": (FILM, {"fps": 2.0, "do_sample_frames": False})},
    ]
    found = {tuple(item.digest for item in items_of(chat(ONE, ["a ", form]))) for form in forms}
    assert len(found) == 1
    urls = [VIDEO, {"type": "video", "video": jpegs(FILM)}, {"type": "video", "url": jpegs(FILM)}]
    found = {tuple(item.digest for item in items_of(chat(ONE, ["a ", form]))) for form in urls}
    assert len(found) == 1
    several = ONE.prepare(given([FILM, frames], "<|video_pad|>;<|video_pad|>"), PARAMS).request
    assert Counter(item.digest for item in items_of(several)).most_common(1)[0][1] == 2
    assert items_of(ONE.prepare(given(FILM[None]), PARAMS).request)[0].digest == items_of(several)[0].digest


def test_images_and_videos_stand_where_the_template_has_them() -> None:
    image = {"type": "image_url", "image_url": {"url": image_url(picture(40, 31))}}
    request = chat(ONE, ["a ", VIDEO, " b ", image, " c ", VIDEO])
    shapes = [item.shape[0] for item in items_of(request)]
    assert shapes.count(1) == 1
    assert 1 in shapes[1:-1]
    starts = [item.start for item in items_of(request)]
    assert starts == sorted(starts)


def test_a_model_whose_template_takes_only_strings() -> None:
    template = "{% for m in messages %}<s>{{ m.role }}: {{ m.content + '' }}</s>{% endfor %}"
    around = [token("<|vision_start|>"), token("<|vision_end|>")]
    request = chat(ONE, ["a ", VIDEO, " b"], template)
    first = request.tokens.index(PLACEHOLDER)
    assert request.tokens[first - 1] == around[0]


def test_texts_of_a_video_are_tokenized_with_those_beside_it() -> None:
    """SmolVLM's: `User: ` and the sentence about the video are one text."""
    own = info("smolvlm")
    text = "Look:<video>Which?"
    whole = preparer(own).prepare(given((FILM, {"fps": 4.0}), text), PARAMS).request
    words = (
        "Look:You are provided the following series of two frames from a 0:00:02 [H:MM:SS] video.\n\nFrame from 00:00:"
    )
    start = whole.tokens.index(PLACEHOLDER)
    expected = WORDS.encode(f"{words}<fake_token_around_image><global-img>")
    assert whole.tokens[:start] == expected
    end = len(whole.tokens) - whole.tokens[::-1].index(PLACEHOLDER)
    assert whole.tokens[end:] == WORDS.encode("<fake_token_around_image>\n\nWhich?", add_special_tokens=False)


def test_marks_that_messages_spell_are_text() -> None:
    internvl = preparer(info("internvl"))
    template = QWEN.replace("<|vision_start|><|video_pad|><|vision_end|>", "<video>")
    request = chat(internvl, ["a <video> ", VIDEO], template)
    assert len(items_of(request)) == 8
    spelled = [token for token in request.tokens if token == WORDS.special.tokens["<video>"]]
    assert not spelled
    request = chat(ONE, ["<|video_pad|> is a token. ", VIDEO])
    assert token("<|video_pad|>") not in request.tokens


def test_a_prompt_of_tokens() -> None:
    tokens = WORDS.encode("see <|video_pad|> now")
    request = ONE.prepare({"prompt_token_ids": tokens, "multi_modal_data": {"video": FILM}}, PARAMS).request
    assert request.tokens == ONE.prepare(given(FILM), PARAMS).request.tokens
    internvl = preparer(info("internvl"))
    asked: Any = {"prompt_token_ids": WORDS.encode("see <video> now"), "multi_modal_data": {"video": FILM}}
    assert len(items_of(internvl.prepare(asked, PARAMS).request)) == 8


def test_what_a_request_says_of_sampling() -> None:
    whole = (FILM, {"fps": 8.0})
    counts = {}
    for name, more in {
        "all": {"mm_processor_kwargs": {"fps": 8}},
        "half": {"mm_processor_kwargs": {"num_frames": 4}},
        "vllm": {"media_io_kwargs": {"video": {"num_frames": 4}}},
        "small": {"mm_processor_kwargs": {"num_frames": 4, "max_pixels": 14 * 14 * 4}},
    }.items():
        items = items_of(ONE.prepare(given(whole, **more), PARAMS).request)
        counts[name] = sum(item.shape[0] for item in items), sum(item.count for item in items)
    assert counts["all"][0] == 8
    assert counts["half"] == counts["vllm"]
    assert counts["half"][0] == 4
    assert counts["small"][1] < counts["half"][1]
    params = PARAMS.replace(feature_args={NAME: {"mm_processor_kwargs": {"num_frames": 2}}})
    assert sum(item.shape[0] for item in items_of(ONE.prepare(given(whole), params).request)) == 2


LONG = (film(40, 40, 30), {"fps": 1.0})


@pytest.mark.parametrize(
    ("prompt", "says"),
    [
        (given([]), "has 1 places of videos ('<|video_pad|>'), and multi_modal_data has 0"),
        (given([FILM] * 2), "has 1 places of videos"),
        (given([FILM] * 3, "<|video_pad|>" * 3), "At most 2 video(s)"),
        (given(5), "multi_modal_data.video.0 must be a NumPy array"),
        (given(np.zeros((3, 4), np.uint8)), "must be a NumPy array [frames, height, width, 3]"),
        ({"prompt": "a", "multi_modal_data": {"audio": [1]}}, "this model reads images or videos only"),
        (given(FILM, mm_processor_kwargs={"fps": -1}), "mm_processor_kwargs.fps must be"),
        ({"prompt": "a <|image_pad|>", "multi_modal_data": {"image": picture(9, 9)}, "mm_processor_kwargs": {"fps": 1}},
         "has no effect: the prompt has no video"),
    ],
)  # fmt: skip
def test_what_is_refused(prompt: Any, says: str) -> None:
    assert says in refusal(ONE, prompt).message


def test_tokens_that_are_none() -> None:
    asked: Any = {"prompt_token_ids": [1, "a"], "multi_modal_data": {"video": FILM}}
    assert refusal(ONE, asked).message == "prompt_token_ids must be a list of integers."


def test_too_long_for_the_context() -> None:
    small = preparer(max_model_len=100)
    error = refusal(small, given(LONG))
    assert "multi_modal_data.video.0 has 1" in error.message
    assert "(40 frames of " in error.message
    assert "the context has room for" in error.message
    assert "num_frames or fps in mm_processor_kwargs" in error.message


def test_times_beyond_the_context() -> None:
    """40 seconds are 160 positions, and with few frames fewer tokens."""
    few = given(LONG, mm_processor_kwargs={"num_frames": 4, "max_pixels": 14 * 14 * 4})
    tokens = len(ONE.prepare(few, PARAMS).request.tokens)
    assert tokens < 50
    error = refusal(preparer(max_model_len=64), few)
    assert "times of videos are positions, and the context has 64" in error.message


def test_videos_that_are_not_read() -> None:
    off = info(refused="the server was started with --limit-mm-per-prompt video=0")
    with pytest.raises(UnsupportedError, match="video=0"):
        chat(preparer(off), ["a", VIDEO])
    assert "video=0" in refusal(preparer(off), given(FILM)).message
    images_only = msgspec.structs.replace(info(), video=None)
    with pytest.raises(UnsupportedError, match="is video, and this model reads images"):
        chat(preparer(images_only), ["a", VIDEO])
    videos_only = msgspec.structs.replace(info(), refused="image=0")
    assert items_of(chat(preparer(videos_only), ["a", VIDEO]))
    with pytest.raises(UnsupportedError, match="can't be read: image=0"):
        chat(preparer(videos_only), ["a", {"type": "image_url", "image_url": {"url": "x"}}])


def test_a_damaged_video_names_its_field() -> None:
    part = {"type": "video_url", "video_url": {"url": data_url(mp4(FILM)[:300])}}
    with pytest.raises(InvalidRequestError) as caught:
        chat(ONE, ["a", part])
    assert caught.value.param == "messages.0.content.1.video_url.url"
    assert "is a damaged video" in caught.value.message
