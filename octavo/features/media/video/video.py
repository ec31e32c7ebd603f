"""`Video`: frames that can be read, and `Sampling`: which of them a request asks for. Without Pillow and NumPy."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from octavo.core.errors import InvalidRequestError, UnsupportedError

if TYPE_CHECKING:
    from PIL.Image import Image

MOST_FPS = 1000.0
_MOST_FRAMES = 1 << 20
ASSUMED_FPS = 2.0
"""Frames per second of frames that come without a rate: clients that send frames have usually sampled at this one."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What a video is decoded to, at most; see `MediaSettings`.

    Attributes:
        frame_pixels: of one frame.
        pixels: of all its frames together, including those that are not used.
    """

    frames: int
    seconds: float
    frame_pixels: int
    pixels: int

    def check(self, count: int, fps: float, size: tuple[int, int], param: str) -> None:
        """Raise InvalidRequestError if a video is too large, or has no frames."""
        width, height = size
        if count < 1 or width < 1 or height < 1:
            raise InvalidRequestError(f"{param} has no frames: {count} of {width} x {height} pixels.", param=param)
        if not 0 < fps <= MOST_FPS:  # also if it is not a number
            raise InvalidRequestError(
                f"{param} has {fps:g} frames per second, which must be more than 0 and at most {MOST_FPS:g}.",
                param=param,
            )
        for value, most, unit, flag, remedy in (
            (count, self.frames, "frames", "frames", "Send fewer frames."),
            (count / fps, self.seconds, "seconds", "seconds", "Send a shorter piece."),
            (width * height, self.frame_pixels, "pixels in a frame", None, "Send a smaller one."),
            (width * height * count, self.pixels, "pixels in all frames", "pixels", "Send a smaller or shorter one."),
        ):
            if value > most:
                name = "--max-image-pixels" if flag is None else f"--max-video-{flag}"
                raise InvalidRequestError(
                    f"{param} has {round(value, 1):,} {unit}; video may have {most:,} ({name}). {remedy}",
                    param=param,
                    value=value,
                )


@dataclass(frozen=True, slots=True)
class Video:
    """A video.

    Attributes:
        count: its frames.
        fps: frames per second; of a sample, those of the original.
        size: width and height of a frame.
        read: yields the frames with these indices, which ascend, as images of Pillow in RGB.
        numbers: of a sample: which frames of the original these are. All of them are used.
        total: of a sample: frames of the original.
    """

    count: int
    fps: float
    size: tuple[int, int]
    read: Callable[[Sequence[int]], Iterator[Image]]
    numbers: Sequence[int] = ()
    total: int = 0

    @property
    def is_sample(self) -> bool:
        return bool(self.numbers)

    @property
    def frames_in_all(self) -> int:
        return self.total or self.count

    @property
    def seconds(self) -> float:
        return self.frames_in_all / self.fps

    def number(self, index: int) -> int:
        """Return the number of a frame in the original."""
        return self.numbers[index] if self.numbers else index


@dataclass(frozen=True, slots=True)
class Sampling:
    """What a request asks for; None is the model's default.

    Attributes:
        fps: frames per second to use; of a sample without a rate, the rate at which it was taken.
        num_frames: frames to use.
        max_pixels: of a frame after resizing, or of all frames together where the model counts them so.
        param: the field that said so, for errors.
    """

    fps: float | None = None
    num_frames: int | None = None
    max_pixels: int | None = None
    param: str = "mm_processor_kwargs"

    @classmethod
    def of(cls, processor: Any, io: Any) -> Sampling:
        """Read `mm_processor_kwargs` and `media_io_kwargs` of a request; None for neither.

        Raises:
            InvalidRequestError: a value is out of range, or fps and num_frames are both given.
            UnsupportedError: a field has no effect here.
        """
        found: dict[str, Any] = {}
        of_videos = _object(io, "media_io_kwargs")
        odd = next((name for name, value in of_videos.items() if name != "video" and value), None)
        if odd is not None:
            raise UnsupportedError(
                f"media_io_kwargs has {odd!r}, which has no effect: only video has settings there. Leave it out.",
                param="media_io_kwargs",
            )
        param = "mm_processor_kwargs"
        for where, given in (
            ("media_io_kwargs.video", _object(of_videos.get("video"), "media_io_kwargs.video")),
            ("mm_processor_kwargs", _object(processor, "mm_processor_kwargs")),
        ):
            for name, value in given.items():
                if value is not None:
                    found[name] = _checked(name, value, where)
                    param = where
        if found.get("fps") is not None and found.get("num_frames") is not None:
            raise InvalidRequestError(
                "fps and num_frames can't be combined, since each says how many frames are used; leave one out.",
                param=param,
            )
        return cls(**found, param=param)


def _object(given: Any, param: str) -> Mapping[str, Any]:
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise InvalidRequestError(
            f'{param} must be an object such as {{"num_frames": 16}}, got {type(given).__name__}.', param=param
        )
    return given


def _checked(name: str, value: Any, where: str) -> Any:
    param = f"{where}.{name}"
    number = not isinstance(value, bool) and isinstance(value, int | float) and math.isfinite(value)
    match name:
        case "fps":
            if not number or not 0 < value <= MOST_FPS:
                raise InvalidRequestError(
                    f"{param} must be a number of frames per second, more than 0 and at most {MOST_FPS:g}, got "
                    f"{value!r}.",
                    param=param,
                )
            return float(value)
        case "num_frames" | "max_pixels":
            most = _MOST_FRAMES if name == "num_frames" else 1 << 40
            if not number or value != int(value) or not 1 <= value <= most:
                raise InvalidRequestError(
                    f"{param} must be a whole number from 1 to {most:,}, got {value!r}.", param=param
                )
            return int(value)
    raise UnsupportedError(
        f"{param} has no effect here: a request may set fps, num_frames and max_pixels, of its videos. Leave it out.",
        param=param,
        value=value,
    )
