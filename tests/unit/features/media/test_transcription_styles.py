"""How models are asked for what is said, and what is read from their answers, whole or as they grow."""

from __future__ import annotations

import pytest

from octavo.core.errors import InvalidRequestError, UnsupportedError
from octavo.features.media.kinds import KINDS
from octavo.features.media.transcription.styles import AUDIO, STYLES, TRANSCRIBE, TRANSLATE, Told

ASR, AUDIO_2, FLAMINGO = (
    STYLES[f"{name}ForConditionalGeneration"] for name in ("Qwen3ASR", "Qwen2Audio", "AudioFlamingo3")
)


def test_all_models_with_audio_have_one() -> None:
    assert set(STYLES) == {name for name, kinds in KINDS.items() if kinds[0].modality == "audio"}


def test_questions() -> None:
    assert ASR.messages(TRANSCRIBE, "en", None) == [{"role": "user", "content": [AUDIO]}]
    assert ASR.messages(TRANSCRIBE, None, "Octavo")[0] == {"role": "system", "content": "Octavo"}
    assert [ASR.prefill(one) for one in (None, "yue", "german")] == [
        "",
        "language Cantonese<asr_text>",
        "language German<asr_text>",
    ]
    (asked,) = AUDIO_2.messages(TRANSCRIBE, "en", None)
    assert asked["content"] == [AUDIO, "Detect the language and recognize the speech: <|en|>"]
    (asked,) = AUDIO_2.messages(TRANSLATE, None, None)
    assert asked["content"] == [AUDIO, "Detect the language and translate the speech into English:"]
    (asked,) = FLAMINGO.messages(TRANSCRIBE, None, None)
    assert asked["content"] == ["Transcribe the input speech.", AUDIO]
    assert [style.tasks for style in (ASR, AUDIO_2, FLAMINGO)] == [
        (TRANSCRIBE,),
        (TRANSCRIBE, TRANSLATE),
        (TRANSCRIBE,),
    ]


def test_what_has_no_effect_is_refused() -> None:
    for style in (AUDIO_2, FLAMINGO):
        with pytest.raises(UnsupportedError, match="prompt has no effect"):
            style.messages(TRANSCRIBE, None, "Octavo")
    with pytest.raises(UnsupportedError, match="language has no effect"):
        FLAMINGO.messages(TRANSCRIBE, "en", None)
    with pytest.raises(InvalidRequestError, match="must be a code of ISO 639"):
        AUDIO_2.messages(TRANSCRIBE, "English", None)
    with pytest.raises(InvalidRequestError, match="'tlh' is unknown to this model"):
        ASR.prefill("tlh")


@pytest.mark.parametrize(
    ("name", "language", "answer", "told"),
    [
        ("Qwen3ASR", None, "language English<asr_text>Hello.", Told("Hello.", "English")),
        ("Qwen3ASR", None, "language None<asr_text>", Told("", None)),
        ("Qwen3ASR", None, " no mark ", Told("no mark", None)),
        ("Qwen3ASR", "de", "Guten Tag.", Told("Guten Tag.", "German")),
        ("Qwen2Audio", None, "<|zh|>你好。", Told("你好。", "zh")),
        ("Qwen2Audio", "en", " Hello.", Told("Hello.", "en")),
        ("Qwen2Audio", None, "<|", Told("<|", None)),
        ("AudioFlamingo3", None, 'The spoken content of the audio is "it\'s late".', Told("it's late")),
        ("AudioFlamingo3", None, "The transcription of the audio is 'two. Three.'", Told("two. Three.")),
        ("AudioFlamingo3", None, 'Only text, "quoted".', Told('Only text, "quoted"')),
    ],
)
def test_answers(name: str, language: str | None, answer: str, told: Told) -> None:
    style = STYLES[f"{name}ForConditionalGeneration"]
    assert style.told(answer, language, whole=True) == told
    shown = ""
    for end in range(len(answer)):
        so_far = style.told(answer[:end], language, whole=False)
        if so_far is not None:
            assert so_far.text.startswith(shown)
            shown = so_far.text
    assert told.text.startswith(shown)
