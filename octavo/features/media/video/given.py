"""Videos that are objects of Python: arrays and lists of frames, perhaps with what is known of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from octavo.core.errors import InvalidRequestError
from octavo.features.media.decode import converted
from octavo.features.media.video.video import ASSUMED_FPS, Limits, Video

if TYPE_CHECKING:
    from PIL.Image import Image

_KNOWN = frozenset(
    (
        "fps",
        "total_num_frames",
        "duration",
        "frames_indices",
        "do_sample_frames",
        "video_backend",
        "width",
        "height",
        "original_fps",
    )
)


def converted_video(given: Any, limits: Limits, fps: float | None, param: str) -> Video:
    """Return a video of a NumPy array [frames, height, width, 3] of uint8, or a list of images of Pillow or of arrays
    [height, width, 3]; alone, or in a pair with an object of what is known of it.

    Args:
        fps: what the request asks for: the rate of frames that come without one.

    Raises:
        InvalidRequestError: it is none, or too large.
    """
    frames: Any = given
    known: Mapping[str, Any] = {}
    if isinstance(given, tuple) and len(given) == 2 and isinstance(given[1], Mapping):
        frames, known = given
    frames = _frames(frames, param)
    size = _size(frames[0], param) if len(frames) else (0, 0)
    odd = next((name for name in known if name not in _KNOWN), None)
    if odd is not None:
        raise InvalidRequestError(f"{param} has {odd!r}, which is not known of videos. Leave it out.", param=param)
    numbers, total = _sample(known, len(frames), param)
    rate = known.get("fps")
    if rate is not None and (isinstance(rate, bool) or not isinstance(rate, int | float | np.number)):
        raise InvalidRequestError(f"{param} has fps={rate!r}, which must be a number.", param=param)
    rate = float(rate if rate is not None else fps or ASSUMED_FPS)
    if not known:  # frames alone are a sample
        numbers, total = range(len(frames)), len(frames)
    limits.check(len(frames), rate, size, param)
    most = limits.frame_pixels

    def read(indices: Sequence[int]) -> Iterator[Image]:
        for index in indices:
            yield converted(frames[index], most, f"{param}.{index}")

    return Video(len(frames), rate, size, read, numbers, total)


def _frames(given: Any, param: str) -> Sequence[Any]:
    if isinstance(given, np.ndarray) and given.ndim == 4 and given.dtype == np.uint8 and given.shape[3] == 3:
        return given  # type: ignore[return-value]  # a sequence of frames in all that is used here
    if isinstance(given, list | tuple):
        return given
    what = f"{list(given.shape)} of {given.dtype}" if isinstance(given, np.ndarray) else type(given).__name__
    raise InvalidRequestError(
        f"{param} must be a NumPy array [frames, height, width, 3] of uint8, or a list of images, or a pair of one and "
        f"an object such as {{'fps': 30.0}}; got {what}.",
        param=param,
    )


def _size(frame: Any, param: str) -> tuple[int, int]:
    from PIL.Image import Image  # imported here: a program may send arrays only

    if isinstance(frame, Image):
        return frame.size
    if isinstance(frame, np.ndarray) and frame.ndim == 3:
        return int(frame.shape[1]), int(frame.shape[0])
    raise InvalidRequestError(
        f"{param} must be frames: images of Pillow, or NumPy arrays [height, width, 3] of uint8; got "
        f"{type(frame).__name__}.",
        param=param,
    )


def _sample(known: Mapping[str, Any], count: int, param: str) -> tuple[Sequence[int], int]:
    """Return the numbers of a sample's frames, and how many the original has; nothing of a whole video."""
    indices = known.get("frames_indices")
    total = known.get("total_num_frames")
    if indices is None and known.get("do_sample_frames", True) is not False:
        return (), 0
    numbers = list(range(count)) if indices is None else [int(one) for one in indices]
    if len(numbers) != count or numbers != sorted(numbers) or (numbers and numbers[0] < 0):
        raise InvalidRequestError(
            f"{param} has {count} frames and {len(numbers)} frames_indices, which must be as many, and ascend.",
            param=param,
        )
    least = numbers[-1] + 1 if numbers else 0
    total = least if total is None else int(total)
    if total < least:
        raise InvalidRequestError(
            f"{param} has total_num_frames={total}, fewer than its frames_indices, which go to {least - 1}.",
            param=param,
        )
    return numbers, total
