"""`MediaText`: the text half. It reads images, videos and audio, and lays out their placeholders among the tokens of
prompts."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

from octavo.core.errors import UnsupportedError
from octavo.core.params import SamplingParams
from octavo.features.media.kinds import PLURALS
from octavo.features.media.parts import AUDIO, IMAGES, MODALITIES, VIDEO
from octavo.features.media.payload import NAME, MediaInfo
from octavo.text.hooks import ReadPrompt, TextContext, TextHook

if TYPE_CHECKING:
    from octavo.features.media.read import Reader
    from octavo.text.prompts.message_parts import GivenPart, MessageParts

_THREADS = 16
"""Prompts whose images or audio are fetched and decoded at once. Hosts may be slow, and what is decoded is large."""
_ATTACHED = {
    "image": ("image/png", "image/jpeg", "image/webp", "image/gif", "image/bmp"),
    "video": ("video/mp4", "video/quicktime", "video/webm", "video/x-matroska", "video/x-msvideo"),
    "audio": ("audio/wav", "audio/x-wav", "audio/flac", "audio/x-flac", "audio/ogg", "audio/mpeg"),
}
_SAMPLING = ("mm_processor_kwargs", "media_io_kwargs")


class MediaText(TextHook):
    """Claims prompts with images, videos or audio, alone or among the parts of messages."""

    name = NAME
    prompt_fields = ("multi_modal_data",)
    body_fields = _SAMPLING
    shown_as: ClassVar[Mapping[str, str]] = MODALITIES
    part_fields: ClassVar[Mapping[str, str]] = {**IMAGES, **AUDIO, **VIDEO}

    def __init__(self, context: TextContext) -> None:
        super().__init__(context)
        self._info = context.info.facts(NAME, MediaInfo)
        self._reader: Reader | None = None

    def start_rows(self) -> list[tuple[str, str]]:
        rows = []
        for own in () if self._info is None else (self._info, self._info.video):
            if own is not None:
                read = f"no: {own.refused}" if own.refused else f"up to {own.limit} a prompt"
                rows.append((PLURALS[own.modality], read))
        return rows

    @property
    def attached(self) -> str:
        read = () if self._info is None else self._info.read
        return ",".join(kind for own in read for kind in _ATTACHED[own.modality])

    @property
    def unshown(self) -> Collection[str]:
        """Videos whose mark is no token: templates were made without them."""
        return VIDEO if self._info is not None and self._info.video and self._made().marks_are_text else ()

    def params_of(self, body: Any, *, max_bytes: int) -> dict[str, Any]:
        given = {name: value for name in _SAMPLING if (value := (body.model_extra or {}).get(name))}
        if not given:
            return {}
        parts: MessageParts | None = getattr(body, "parts", None)
        if parts is None or not any(MODALITIES.get(part.kind) == "video" for part in parts.given):
            name = next(iter(given))
            raise UnsupportedError(
                f"{name} has no effect: it says how videos are read, and the request has none. Leave it out.",
                param=name,
            )
        return {"feature_args": {NAME: given}}

    def check_parts(self, given: Sequence[GivenPart]) -> None:
        for part in given:
            modality = MODALITIES[part.kind]
            if self._info is None:
                where = part.param.rsplit(".", 1)[0]
                raise UnsupportedError(
                    f"{where} is of type {part.kind!r}, but this model reads only text parts.",
                    param=where.rpartition(".")[0],
                    value=part.kind,
                )
            own = self._info.of(modality)
            if own is None:
                self._check_supported(part.param)
                some = " and ".join(PLURALS[one.modality] for one in self._info.read)
                raise UnsupportedError(
                    f"{part.param} is {modality}, and this model reads {some}. Leave it out.",
                    param=part.param,
                    value=part.kind,
                )
            if own.refused:
                raise UnsupportedError(f"{part.param} can't be read: {own.refused}. Leave it out.", param=part.param)

    @cached_property
    def threads(self) -> Executor:
        return ThreadPoolExecutor(_THREADS, thread_name_prefix="octavo-media")

    def read_prompt(self, prompt: Mapping[str, Any], params: SamplingParams, *, truncated: bool) -> ReadPrompt:
        self._check_supported("multi_modal_data")
        return self._made().read(prompt, params, truncated=truncated)

    def _made(self) -> Reader:
        if self._reader is None:
            from octavo.features.media.read import Reader  # imported here: it needs NumPy and Pillow

            assert self._info is not None
            self._reader = Reader(self.context.tokenizer, self.context.info, self._info)
        return self._reader

    def _check_supported(self, param: str) -> None:
        """Raise UnsupportedError if only text is read."""
        why = "this model takes only text" if self._info is None else self._info.refused
        if why and not (self._info and self._info.read):
            raise UnsupportedError(f"{param} can't be read: {why}. Leave it out.", param=param)


TEXT = MediaText
