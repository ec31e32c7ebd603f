"""What preprocessing of all kinds of videos shares."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, ClassVar

import numpy as np

from octavo.core.errors import ModelFileError, UnsupportedError
from octavo.features.media.processors.base import (
    NORMALIZING,
    LoadTokenizer,
    Piece,
    Pixels,
    TooOddError,
    digits,
    resized,
)
from octavo.features.media.video.video import Sampling, Video

SAMPLING = frozenset(("fps", "num_frames"))
"""Fields that say how frames are chosen."""
USUAL = NORMALIZING | SAMPLING | {"do_resize", "size", "resample"}


class VideoProcessor(ABC):
    """Turns videos into pieces of a prompt. Stateless; may be used from any thread.

    Attributes:
        mark: the text that a chat template writes for a video.
        token: the token of that text; None if it is no token, so that templates may not know it, either.
        around: as of `Processor`.
        textual: the pieces have texts.
        fields: of the preprocessor that are read.
        common: those of them that --mm-processor-kwargs may have beside fields of images.
        has_pixels: `max_pixels` of a request has an effect.
        max_frames: of a video, at most.
    """

    fields: ClassVar[frozenset[str]] = USUAL
    common: ClassVar[frozenset[str]] = NORMALIZING | SAMPLING
    textual: ClassVar[bool] = False
    has_pixels: ClassVar[bool] = False
    mark: str
    token: int | None
    around: tuple[list[int], list[int]] = ([], [])
    max_frames: int = 768

    @abstractmethod
    def __init__(self, config: Mapping[str, Any], processor: Mapping[str, Any], tokenizer: LoadTokenizer) -> None:
        """As of `Processor`."""

    def pieces(self, video: Video, sampling: Sampling, room: int) -> Sequence[Piece]:
        """Choose frames, and return what replaces the mark.

        Args:
            room: tokens that it may have, which is checked before frames are decoded.

        Raises:
            TooOddError: the model can't take it.
            InvalidRequestError: a frame can't be decoded.
        """
        frames = self.chosen(video, sampling)
        count, about = self.cost(video, frames, sampling)
        if count > room:
            raise TooOddError(
                f"has {count:,} tokens ({len(frames)} frames of {about}), and the context has room for {room:,}; send "
                "fewer frames, such as with num_frames or fps in mm_processor_kwargs, or smaller ones"
            )
        return self.laid_out(video, frames, sampling)

    def check(self, sampling: Sampling) -> None:
        """Raise UnsupportedError if a field has no effect on this model."""
        if sampling.max_pixels is not None and not self.has_pixels:
            raise UnsupportedError(
                f"{sampling.param} has max_pixels, which has no effect: this model's frames have one size. Leave it "
                "out.",
                param=sampling.param,
            )

    def chosen(self, video: Video, sampling: Sampling) -> list[int]:
        """Return the indices of the frames to use; they ascend. A sample's are all used, unless the request wants
        fewer."""
        if video.is_sample and (sampling.num_frames is None or sampling.num_frames >= video.count):
            return list(range(video.count))
        return self.sampled(video, sampling)

    @abstractmethod
    def sampled(self, video: Video, sampling: Sampling) -> list[int]:
        """Choose frames as the model's own preprocessor does."""

    @abstractmethod
    def cost(self, video: Video, frames: Sequence[int], sampling: Sampling) -> tuple[int, str]:
        """Return how many placeholders these frames have, and a text about the size of one."""

    @abstractmethod
    def laid_out(self, video: Video, frames: Sequence[int], sampling: Sampling) -> Sequence[Piece]:
        """Read these frames; return the pieces."""

    @property
    @abstractmethod
    def most(self) -> int:
        """Embeddings of the largest item."""


def frames_of(video: Video, frames: Sequence[int], height: int, width: int, resample: int) -> Iterator[Pixels]:
    """Yield frames, resized."""
    for image in video.read(frames):
        yield resized(np.asarray(image), height, width, resample)


def batches(frames: Iterator[Pixels], size: int) -> Iterator[list[Pixels]]:
    """Yield frames in lists of this size; the last one has the rest."""
    while some := list(islice(frames, size)):
        yield some


def rate(processor: Mapping[str, Any], default: float | None) -> float | None:
    """Return the stated frames per second to use. Raise ModelFileError if it is not a positive number."""
    value = processor.get("fps")
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise ModelFileError(f"The model's video processor has fps={value!r}, which should be a positive number.")
    return float(value)


def number(processor: Mapping[str, Any], name: str, default: int | None = None) -> int | None:
    """Return a stated positive whole number, or the default if it is missing or null."""
    return default if processor.get(name) is None else digits(processor, name, 1)
