"""How each architecture is asked for what is said, and how it marks it in its answer."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from octavo.core.errors import InvalidRequestError, UnsupportedError

TRANSCRIBE, TRANSLATE = "transcribe", "translate"
AUDIO = object()
"""Stands for the audio in messages."""


@dataclass(frozen=True, slots=True)
class Told:
    """What an answer says.

    Attributes:
        language: as the model names it; None if it does not.
    """

    text: str
    language: str | None = None


class Style(ABC):
    """Of models of one architecture."""

    tasks: ClassVar[tuple[str, ...]] = (TRANSCRIBE,)

    @abstractmethod
    def messages(self, task: str, language: str | None, prompt: str | None) -> list[dict[str, Any]]:
        """Return the conversation that asks.

        Raises:
            UnsupportedError: the model takes no language, or no prompt.
        """

    def prefill(self, language: str | None) -> str:
        """Return how the answer begins.

        Raises:
            InvalidRequestError: the model does not know the language.
        """
        return ""

    def told(self, answer: str, language: str | None, *, whole: bool) -> Told | None:
        """Return what an answer says so far; None if it can't be told yet.

        Of growing answers, the text only grows.

        Args:
            language: as asked for.
            whole: the answer is complete.
        """
        return Told(answer, language)


class QwenAsr(Style):
    """Qwen3-ASR writes "language English<asr_text>" and then the text. It goes on after these words if it is given
    them, and takes words that may occur as the system's message (https://arxiv.org/abs/2601.21337)."""

    _mark = "<asr_text>"

    def messages(self, task: str, language: str | None, prompt: str | None) -> list[dict[str, Any]]:
        before = [{"role": "system", "content": prompt}] if prompt else []
        return [*before, {"role": "user", "content": [AUDIO]}]

    def prefill(self, language: str | None) -> str:
        return "" if language is None else f"language {_name(language)}{self._mark}"

    def told(self, answer: str, language: str | None, *, whole: bool) -> Told | None:
        if language is not None:
            return Told(answer, _name(language))
        head, mark, text = answer.partition(self._mark)
        if not mark:
            return Told(answer.strip()) if whole else None
        named = head.strip().removeprefix("language").strip()
        return Told(text, None if named in ("", "None") else named)


class QwenAudio(Style):
    """Qwen2-Audio is asked as in its training, and may begin with the tag of a language
    (https://arxiv.org/abs/2407.10759, section 2)."""

    tasks = (TRANSCRIBE, TRANSLATE)
    _tag = re.compile(r"\s*<\|([a-z-]{2,5})\|>\s*")
    _begun = re.compile(r"\s*(<(\|([a-z-]{0,5}(\|>?)?)?)?)?\s*")

    def messages(self, task: str, language: str | None, prompt: str | None) -> list[dict[str, Any]]:
        _refuse_prompt(prompt)
        wish = "recognize the speech" if task == TRANSCRIBE else "translate the speech into English"
        tag = "" if language is None else f" <|{_code(language)}|>"
        return [{"role": "user", "content": [AUDIO, f"Detect the language and {wish}:{tag}"]}]

    def told(self, answer: str, language: str | None, *, whole: bool) -> Told | None:
        if not whole and self._begun.fullmatch(answer):
            return None
        found = self._tag.match(answer)
        if found is None:
            return Told(answer.lstrip(), language)
        return Told(answer[found.end() :], found[1])


class Flamingo(Style):
    """Audio Flamingo 3 may answer with a sentence that quotes what is said, so that nothing can be told before its
    end."""

    _frame = re.compile(
        r"\s*(The spoken content of the audio is|The transcription of the audio is|The content of the input audio is)?"
        r"\s*(.*?)\s*\.?\s*",
        re.DOTALL,
    )

    def messages(self, task: str, language: str | None, prompt: str | None) -> list[dict[str, Any]]:
        _refuse_prompt(prompt)
        if language is not None:
            raise UnsupportedError(
                "language has no effect on this model. Leave it out.", param="language", value=language
            )
        return [{"role": "user", "content": ["Transcribe the input speech.", AUDIO]}]

    def told(self, answer: str, language: str | None, *, whole: bool) -> Told | None:
        found = self._frame.fullmatch(answer) if whole else None
        if found is None:
            return None
        text = found[2]
        quoted = len(text) > 1 and text[0] == text[-1] and text[0] in "'\""
        return Told(text[1:-1].strip() if quoted else text)


STYLES: Mapping[str, Style] = {
    "AudioFlamingo3ForConditionalGeneration": Flamingo(),
    "Qwen2AudioForConditionalGeneration": QwenAudio(),
    "Qwen3ASRForConditionalGeneration": QwenAsr(),
}
"""Architecture -> its style."""

_LANGUAGES = {
    "ar": "Arabic",
    "cs": "Czech",
    "da": "Danish",
    "de": "German",
    "el": "Greek",
    "en": "English",
    "es": "Spanish",
    "fa": "Persian",
    "fi": "Finnish",
    "fil": "Filipino",
    "fr": "French",
    "hi": "Hindi",
    "hu": "Hungarian",
    "id": "Indonesian",
    "it": "Italian",
    "ja": "Japanese",
    "ko": "Korean",
    "mk": "Macedonian",
    "ms": "Malay",
    "nl": "Dutch",
    "pl": "Polish",
    "pt": "Portuguese",
    "ro": "Romanian",
    "ru": "Russian",
    "sv": "Swedish",
    "th": "Thai",
    "tr": "Turkish",
    "vi": "Vietnamese",
    "yue": "Cantonese",
    "zh": "Chinese",
}
"""Codes of ISO 639 -> the names of languages, as Qwen3-ASR writes them."""


def _name(language: str) -> str:
    """Return a language's name; it may be given as a code. Raise InvalidRequestError if it is unknown."""
    found = _LANGUAGES.get(language.lower()) or language.capitalize()
    if found not in _LANGUAGES.values():
        raise InvalidRequestError(
            f"language={language!r} is unknown to this model. It takes {', '.join(_LANGUAGES)}.",
            param="language",
            value=language,
        )
    return found


def _code(language: str) -> str:
    """Return a language's code, such as "en". Raise InvalidRequestError if it is none."""
    if not re.fullmatch(r"[a-z]{2,3}", language):
        raise InvalidRequestError(
            f"language={language!r} must be a code of ISO 639, such as en.", param="language", value=language
        )
    return language


def _refuse_prompt(prompt: str | None) -> None:
    if prompt:
        raise UnsupportedError(
            "prompt has no effect on this model's transcriptions. Leave it out, or ask in /v1/chat/completions.",
            param="prompt",
        )
