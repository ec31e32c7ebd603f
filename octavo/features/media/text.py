"""`MediaText`: the text half. It reads images and audio, and lays out their placeholders among the prompt's tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
    from octavo.text.prompts.message_parts import GivenPart

_THREADS = 16
"""Prompts whose images or audio are fetched and decoded at once. Hosts may be slow, and what is decoded is large."""
_ATTACHED = "image/png,image/jpeg,image/webp,image/gif,image/bmp"


class MediaText(TextHook):
    """Claims prompts with images or audio, alone or among the parts of messages. Video is claimed to be refused."""

    name = NAME
    prompt_fields = ("multi_modal_data",)
    shown_as: ClassVar[Mapping[str, str]] = MODALITIES
    part_fields: ClassVar[Mapping[str, str]] = {**IMAGES, **AUDIO, **VIDEO}

    def __init__(self, context: TextContext) -> None:
        super().__init__(context)
        self._info = context.info.facts(NAME, MediaInfo)
        self._reader: Reader | None = None

    def start_rows(self) -> list[tuple[str, str]]:
        if self._info is None:
            return []
        read = f"no: {self._info.refused}" if self._info.refused else f"up to {self._info.limit} a prompt"
        return [(PLURALS[self._info.modality], read)]

    @property
    def attached(self) -> str:
        info = self._info
        return _ATTACHED if info is not None and info.modality == "image" and not info.refused else ""

    def check_parts(self, given: Sequence[GivenPart]) -> None:
        for part in given:
            modality = MODALITIES[part.kind]
            if modality == "video":
                raise UnsupportedError(
                    f"{part.param} is {modality}, which this version does not support. Leave it out.",
                    param=part.param,
                    value=part.kind,
                )
            if self._info is None:
                where = part.param.rsplit(".", 1)[0]
                raise UnsupportedError(
                    f"{where} is of type {part.kind!r}, but this model reads only text parts.",
                    param=where.rpartition(".")[0],
                    value=part.kind,
                )
            self._check_supported(part.param)
            if modality != self._info.modality:
                raise UnsupportedError(
                    f"{part.param} is {modality}, and this model reads {PLURALS[self._info.modality]}. Leave it out.",
                    param=part.param,
                    value=part.kind,
                )

    @cached_property
    def threads(self) -> Executor:
        return ThreadPoolExecutor(_THREADS, thread_name_prefix="octavo-media")

    def read_prompt(self, prompt: Mapping[str, Any], params: SamplingParams, *, truncated: bool) -> ReadPrompt:
        self._check_supported("multi_modal_data")
        assert self._info is not None
        if self._reader is None:
            from octavo.features.media.read import Reader  # imported here: it needs NumPy and Pillow

            self._reader = Reader(self.context.tokenizer, self.context.info, self._info)
        return self._reader.read(prompt, params, truncated=truncated)

    def _check_supported(self, param: str) -> None:
        why = "this model takes only text" if self._info is None else self._info.refused
        if why:
            raise UnsupportedError(f"{param} can't be read: {why}. Leave it out.", param=param)


TEXT = MediaText
