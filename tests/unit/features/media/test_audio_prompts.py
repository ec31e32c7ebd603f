"""What the text half makes of prompts with audio."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import msgspec
import numpy as np
import pytest
import transformers
from audio_kit import RATE, cases, data_url, sound, token, tokenizer
from image_kit import TEMPLATE
from test_audio_processors import config_of

from octavo.core.errors import InvalidRequestError
from octavo.core.params import SamplingParams
from octavo.core.request import PLACEHOLDER, GenerateRequest
from octavo.engine.fake import fake_info
from octavo.features.media.payload import NAME, MediaInfo, MediaItem
from octavo.text.chat.template import ChatTemplate
from octavo.text.prompts.message_parts import taken
from octavo.text.prompts.prepare import Preparer
from octavo.text.tokenizers.tokenizer import Tokenizer

WORDS = Tokenizer(tokenizer(), named_tokens={"bos_token": "<s>"})
SOUND = sound(2.5)
PARAMS = SamplingParams(max_tokens=4)
PLACE = cases()["qwen3-asr"].place
KNOWN = TEMPLATE.replace("'image'", "'audio'").replace("IMAGE", PLACE)


def preparer(**more: Any) -> Preparer:
    own = MediaInfo(
        **{
            "modality": "audio",
            "config": config_of("qwen3-asr"),
            "processor": cases()["qwen3-asr"].extractor.to_dict(),
            "limit": 2,
            "timeout_s": 1.0,
            "max_bytes": 10**6,
            "max_seconds": 5.0,
        }
        | more
    )
    facts = {NAME: msgspec.Raw(msgspec.msgpack.encode(own))}
    return Preparer(WORDS, fake_info(features=[NAME], feature_info=facts, vocab_size=600))


def items_of(request: GenerateRequest) -> list[MediaItem]:
    return msgspec.msgpack.decode(request.options[NAME], type=list[MediaItem])


def given(audio: Any, text: str = f"hear {PLACE} now", **more: Any) -> Any:
    return {"prompt": text, "multi_modal_data": {"audio": audio}, **more}


def chat(*parts: Any, template: str = KNOWN) -> GenerateRequest:
    one = preparer()
    texts = [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
    plain, found = taken([{"role": "user", "content": texts}])
    assert found is not None
    one.check_parts(found)
    text = ChatTemplate(template, WORDS).render(plain, shown=found.shown)
    return one.prepare(found.prompt(text), PARAMS, add_special_tokens=False, param="messages").request


def test_windows_are_items_with_keys_of_their_own() -> None:
    request = preparer().prepare(given((SOUND, RATE)), PARAMS).request
    first, second = items_of(request)
    assert (first.shape, first.dtype, first.layout, first.count) == ((2, 16, 100), "<f4", (200,), 26)
    assert (second.shape, second.layout, second.count) == ((1, 16, 100), (50,), 7)
    assert len(first.data) == 4 * 2 * 16 * 100
    assert (first.work, second.work) == (3200, 1600)
    ((start, begin, count),) = first.runs
    assert (begin, count) == (0, 26)
    assert second.runs == [(start + 26, 0, 7)]
    assert request.tokens[start - 1 : start + 34] == [
        token("<|audio_start|>"),
        *[PLACEHOLDER] * 33,
        token("<|audio_end|>"),
    ]
    keys = [first.digest + i.to_bytes(4, "little") for i in range(26)]
    assert request.keys[start : start + 26] == keys


def test_other_samples_are_other_keys() -> None:
    digests = {
        items_of(preparer().prepare(given((samples, RATE)), PARAMS).request)[0].digest
        for samples in (SOUND, sound(2.5, seed=1), SOUND * 0.5, SOUND)
    }
    assert len(digests) == 3


def test_forms_of_audio() -> None:
    url = data_url(SOUND)
    forms = [
        {"type": "audio", "audio": (SOUND, RATE)},
        {"type": "audio", "audio": [SOUND, RATE]},
        {"type": "audio", "audio": url},
        {"type": "audio", "url": url},
        {"type": "audio_url", "audio_url": {"url": url}},
        {"type": "audio_url", "audio_url": url},
        {"type": "input_audio", "input_audio": {"data": url.partition(",")[2], "format": "wav"}},
        {"type": "input_audio", "input_audio": {"data": url.partition(",")[2]}},
    ]
    assert len({items_of(chat("a ", form))[0].digest for form in forms}) == 1


def test_templates_of_texts_get_audio_in_its_place() -> None:
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    request = chat("a", {"type": "audio", "audio": (sound(1.0), RATE)}, "b", template=template)
    around = [token("<|audio_start|>"), *[PLACEHOLDER] * 13, token("<|audio_end|>")]
    assert request.tokens == [*WORDS.encode("a\n"), *around, *WORDS.encode_after("\nb")]


def test_a_published_template() -> None:
    """Qwen2-Audio's, which numbers the pieces."""
    template = transformers.Qwen2AudioProcessor.default_chat_template.fget(None)
    audio = {"type": "audio_url", "audio_url": {"url": data_url(SOUND)}}
    plain, found = taken([{"role": "user", "content": [audio, {"type": "text", "text": "Who?"}, audio]}])
    assert found is not None
    text = ChatTemplate(template, WORDS).render(plain, shown=found.shown)
    assert text == (
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n"
        "Audio 1: <|audio_bos|><|AUDIO|><|audio_eos|>\nWho?Audio 2: <|audio_bos|><|AUDIO|><|audio_eos|>\n<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


@pytest.mark.parametrize(
    ("prompt", "says"),
    [
        (given([]), "has 1 places of audio ('<|audio_pad|>'), and multi_modal_data has 0"),
        (given([(SOUND, RATE)] * 3, PLACE * 3), "At most 2 audio(s)"),
        (given("a.wav"), "must be a URL that begins with data:"),
        (given(5), "multi_modal_data.audio.0 must be a pair (NumPy array, sampling rate)"),
        (given([SOUND]), "must be a pair"),
        (given((np.zeros(16000 * 6, np.float32), RATE)), "is 6.0 seconds long; audio may have 5"),
        ({"prompt": "a", "multi_modal_data": {"image": [1]}}, "has 'image'; this model reads audio only"),
        ({"prompt": "a", "multi_modal_data": {"image": np.ones(3)}}, "has 'image'; this model reads audio only"),
        (given((SOUND, RATE), PLACE + " a" * 1100), "maximum context length"),
    ],
)
def test_what_is_refused(prompt: Any, says: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        preparer().prepare(prompt, PARAMS)
    assert says in caught.value.message


def test_what_audio_can_not_be_combined_with() -> None:
    for params, options in ((PARAMS, {"truncate": 5}), (PARAMS.replace(prompt_logprobs=1), {})):
        with pytest.raises(InvalidRequestError, match="can't be combined with audio"):
            preparer().prepare(given((SOUND, RATE)), params, **options)  # type: ignore[arg-type]


def test_images_and_refused_models() -> None:
    with pytest.raises(InvalidRequestError, match=r"content.1.image_url is image, and this model reads audio"):
        chat("a", {"type": "image_url", "image_url": {"url": "x"}})
    with pytest.raises(InvalidRequestError, match=r"multi_modal_data can't be read: its files are missing"):
        preparer(refused="its files are missing").prepare(given((SOUND, RATE)), PARAMS)


def test_nothing_is_imported_before_audio_comes() -> None:
    code = (
        "import sys, octavo.features.media.text, octavo.features.media.http\n"
        "print({'numpy', 'soundfile', 'PIL'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
