"""Checks of `octavo doctor`: what a model that reads audio needs."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import dataclass

from octavo.cli.doctor.check import Area, Check, Finding, Wish, fine, warning
from octavo.cli.doctor.model import files_of, to_pull
from octavo.core.errors import OctavoError
from octavo.features.media.kinds import has_media, modality_of


@dataclass(frozen=True, slots=True)
class Sound:
    """Whether the library that decodes sound is installed."""

    has_library: bool


def read(wish: Wish) -> Sound | None:
    model = wish.engine.model
    if not wish.has_model or to_pull(model.model, model.download_dir):
        return None
    try:
        config = files_of(wish).config
    except OctavoError:  # the model's own check says it
        return None
    if not has_media(config) or modality_of(config) != "audio":
        return None
    return Sound(importlib.util.find_spec("soundfile") is not None)


def judge(found: Sound) -> Finding:
    if found.has_library:
        return fine("WAV, FLAC, OGG and MP3 can be read")
    return warning(
        "the package soundfile is not installed, so only WAV files can be read",
        f"{sys.executable} -m pip install 'octavo[audio]'",
    )


AREA = Area("audio", read, (Check("formats", judge),))
