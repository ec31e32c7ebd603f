"""Decode video: animations by Pillow, frames as JPEG files, and files of video by the library PyAV, within bounds.

Only the frames that are chosen are converted to RGB, one after the other.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from octavo.core.errors import InvalidRequestError, UnsupportedError
from octavo.features.media.decode import decoded, in_rgb
from octavo.features.media.video.video import ASSUMED_FPS, Limits, Video

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = ("MP4", "MOV", "WebM", "MKV", "AVI", "GIF", "animated WebP and PNG")
_CODECS = ("h264", "hevc", "av1", "libdav1d", "vp8", "vp9", "libvpx", "libvpx-vp9", "mpeg4", "mpeg2video", "mjpeg")
"""Decoders of PyAV that are used; those of others are not needed, and so are no risk."""
_ANIMATIONS = ("GIF", "WEBP", "PNG")
_TENTH_MS = 100.0
_THREADS = 4
_NO_PROTOCOL = "none"
_EDGES = 256
"""Pixels that a decoder may add to an edge, and counts."""


def decoded_video(data: bytes, limits: Limits, param: str) -> Video:
    """Return the video of a file.

    Raises:
        InvalidRequestError: it is in none of `FORMATS`, is damaged, or too large, which is known before frames are
            decoded.
        UnsupportedError: it needs a library that is not installed, or another decoder.
    """
    if data[:4] == b"GIF8" or data[:8] == b"\x89PNG\r\n\x1a\n" or (data[:4] == b"RIFF" and data[8:12] == b"WEBP"):
        return _animation(data, limits, param)
    if data[4:8] in (b"ftyp", b"moov", b"mdat", b"wide", b"free", b"skip"):
        return _container(data, "mov", limits, param)
    if data[:4] == b"\x1aE\xdf\xa3":
        return _container(data, "matroska", limits, param)
    if data[:4] == b"RIFF" and data[8:12] == b"AVI ":
        return _container(data, "avi", limits, param)
    raise InvalidRequestError(
        f"{param} is not video: its {len(data)} bytes are in none of the formats {', '.join(FORMATS)}.", param=param
    )


def of_pictures(files: Sequence[bytes], fps: float | None, limits: Limits, param: str) -> Video:
    """Return a video of frames that are image files; all of them are used.

    Args:
        fps: the rate at which they were taken; None for the usual one.
    """
    first = decoded(files[0], limits.frame_pixels, f"{param}: frame 0")
    rate = fps or ASSUMED_FPS
    limits.check(len(files), rate, first.size, param)

    def read(indices: Sequence[int]) -> Iterator[Image]:
        for index in indices:
            yield decoded(files[index], limits.frame_pixels, f"{param}: frame {index}") if index else first

    return Video(len(files), rate, first.size, read, range(len(files)), len(files))


def _damaged(param: str, why: object) -> InvalidRequestError:
    return InvalidRequestError(f"{param} is a damaged video: {why}. Send it again.", param=param)


# Animations


def _animation(data: bytes, limits: Limits, param: str) -> Video:
    from PIL import Image

    def opened() -> Any:
        return Image.open(io.BytesIO(data), formats=_ANIMATIONS)

    try:
        image = opened()
        limits.check(1, 1.0, image.size, param)
        count = int(getattr(image, "n_frames", 1))
        milliseconds = float(image.info.get("duration") or _TENTH_MS)
    except InvalidRequestError:
        raise
    except Exception as exc:  # damaged files raise many types
        raise _damaged(param, exc) from None
    fps = 1000.0 / milliseconds
    limits.check(count, fps, image.size, param)

    def read(indices: Sequence[int]) -> Iterator[Image.Image]:
        try:
            image = opened()
            for index in indices:
                image.seek(index)
                yield in_rgb(image)
        except GeneratorExit:
            raise
        except Exception as exc:
            raise _damaged(param, exc) from None

    return Video(count, fps, image.size, read)


# Files of video


def _container(data: bytes, form: str, limits: Limits, param: str) -> Video:
    library = _library(param)
    try:
        with _opened(library, data, form) as file:
            stream = _stream(file, limits, param)
            size = stream.codec_context.width, stream.codec_context.height
            count = _count(file, stream)
            if count < stream.frames:
                raise ValueError(f"it ends after {count} of {stream.frames} frames")
            fps = _rate(stream, count)
            limits.check(count, fps, size, param)
            turned = _quarter_turns(file, stream)
    except (InvalidRequestError, UnsupportedError):
        raise
    except Exception as exc:  # the library raises many types
        raise _damaged(param, exc) from None

    def read(indices: Sequence[int]) -> Iterator[Image]:
        try:
            with _opened(library, data, form) as file:
                yield from _chosen(file, _stream(file, limits, param), indices)
        except (InvalidRequestError, GeneratorExit):
            raise
        except Exception as exc:
            raise _damaged(param, exc) from None

    return Video(count, fps, size[::-1] if turned % 2 else size, read)


def _library(param: str) -> Any:
    try:
        import av  # type: ignore[import-not-found,import-untyped,unused-ignore]  # optional: an extra
    except (ImportError, OSError) as exc:
        raise UnsupportedError(
            f"{param} is a file of video, and this server reads only animations (GIF, WebP, PNG) and frames as JPEG: "
            f"{exc}. Install octavo[video] there, or send frames as data:video/jpeg;base64,FRAME,FRAME...",
            param=param,
        ) from None
    return av


def _opened(library: Any, data: bytes, form: str) -> Any:
    """Open a file by the reader of its format, which may not open others: playlists name files and hosts."""
    return library.open(io.BytesIO(data), format=form, options={"protocol_whitelist": _NO_PROTOCOL})


def _stream(file: Any, limits: Limits, param: str) -> Any:
    if not file.streams.video:
        raise InvalidRequestError(f"{param} has no video, only {len(file.streams)} other streams.", param=param)
    stream = file.streams.video[0]
    context = stream.codec_context
    if context is None or context.codec.name not in _CODECS:
        name = "of an unknown kind" if context is None else f"{context.codec.name!r}"
        raise UnsupportedError(
            f"{param} has video {name}, which is not read; convert it to H.264, for example.", param=param
        )
    padded = (context.width + _EDGES) * (context.height + _EDGES)
    context.options = {"max_pixels": str(max(padded, limits.frame_pixels))}  # a file may state a smaller size
    context.thread_type, context.thread_count = "AUTO", _THREADS
    return stream


def _count(file: Any, stream: Any) -> int:
    """Count the frames without decoding them: what files state may be wrong, or missing."""
    return sum(1 for packet in file.demux(stream) if packet.size)


def _rate(stream: Any, count: int) -> float:
    rate = stream.average_rate or stream.guessed_rate or stream.base_rate
    if rate:
        return float(rate)
    if stream.duration and stream.time_base:
        return count / float(stream.duration * stream.time_base)
    return ASSUMED_FPS


def _quarter_turns(file: Any, stream: Any) -> int:
    """Return how a player turns the frames, in quarters against the clock. Only a decoded frame says it."""
    file.seek(0)
    first = next(file.decode(stream), None)
    if first is None:
        raise ValueError("no frame can be decoded")
    return _turns(first)


def _turns(frame: Any) -> int:
    return int(round(frame.rotation / 90) % 4)


def _chosen(file: Any, stream: Any, indices: Sequence[int]) -> Iterator[Image]:
    """Yield the frames with these indices, turned as their metadata say."""
    from PIL import Image

    left = iter(indices)
    wanted = next(left, None)
    count = 0
    for number, frame in enumerate(file.decode(stream)):
        count = number + 1
        while wanted == number:
            image = Image.fromarray(frame.to_ndarray(format="rgb24"))
            turns = _turns(frame)
            yield image.rotate(90 * turns, expand=True) if turns else image
            wanted = next(left, None)
        if wanted is None:
            return
    if wanted is not None:
        raise ValueError(f"frame {wanted} can't be decoded, only {count} can")
