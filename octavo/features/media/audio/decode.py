"""Decode files of sound to one channel at 16 kHz, within bounds."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.core.errors import InvalidRequestError, UnsupportedError
from octavo.features.media.audio.mel import RATE
from octavo.features.media.audio.resample import Samples, resampled
from octavo.features.media.audio.wav import WavError, is_wav, read_wav

FORMATS = ("WAV", "FLAC", "OGG", "MP3")
"""Formats that are read. All but plain WAV need the library soundfile, whose readers of others are no risk."""
MOST_RATE = 384_000
_BLOCK = 1 << 18
"""Samples of a channel that are decoded at once."""
_MAGIC = (b"RIFF", b"RIFX", b"fLaC", b"OggS", b"ID3")


def decoded(data: bytes, max_seconds: float, param: str) -> Samples:
    """Return the samples of a file, one channel at 16 kHz; several channels are averaged.

    Raises:
        InvalidRequestError: it is no file of `FORMATS`, is damaged, has no samples, or is longer than `max_seconds`.
        UnsupportedError: it needs a library that is not installed.
    """
    try:
        found = read_wav(data) if is_wav(data) else None
    except WavError as exc:
        raise InvalidRequestError(f"{param} is a WAV file that can't be read: {exc}.", param=param) from None
    if found is None:
        found = _by_library(data, max_seconds, param)
    return _at_rate(*found, max_seconds, param)


def converted(given: Any, max_seconds: float, param: str) -> Samples:
    """Return the samples of a pair (array, sampling rate): floats from -1 to 1 or integers, [samples] or [samples,
    channels].

    Raises:
        InvalidRequestError: it is none, or longer than `max_seconds`.
    """
    pair = given if isinstance(given, tuple | list) and len(given) == 2 else (given, None)
    samples, rate = pair
    if not isinstance(samples, np.ndarray) or isinstance(rate, bool) or not isinstance(rate, int | float | np.number):
        raise InvalidRequestError(
            f"{param} must be a pair (NumPy array, sampling rate), got {type(given).__name__}.", param=param
        )
    if samples.ndim not in (1, 2) or samples.dtype.kind not in "fi":
        raise InvalidRequestError(
            f"{param} must have an array [samples] or [samples, channels] of floats from -1 to 1 or signed integers, "
            f"got {list(samples.shape)} of {samples.dtype}.",
            param=param,
        )
    if samples.dtype.kind == "i":
        samples = samples / -float(np.iinfo(samples.dtype).min)
    if rate != int(rate):
        raise InvalidRequestError(f"{param} has the sampling rate {rate}, which must be a whole number.", param=param)
    return _at_rate(samples.astype(np.float32), int(rate), max_seconds, param)


def _at_rate(samples: NDArray[np.float32], rate: int, max_seconds: float, param: str) -> Samples:
    if not 1 <= rate <= MOST_RATE:
        raise InvalidRequestError(
            f"{param} has {rate} samples per second, which must be from 1 to {MOST_RATE:,}.", param=param, value=rate
        )
    if not samples.size:
        raise InvalidRequestError(f"{param} has no samples. Send one with sound.", param=param)
    _check_length(len(samples) / rate, max_seconds, param)
    mono = samples if samples.ndim == 1 else samples.mean(axis=1, dtype=np.float32)
    if not np.isfinite(mono).all():
        raise InvalidRequestError(f"{param} has samples that are no finite numbers.", param=param)
    return resampled(mono, rate, RATE)


def _by_library(data: bytes, max_seconds: float, param: str) -> tuple[NDArray[np.float32], int]:
    if not data.startswith(_MAGIC) and not _begins_mpeg(data):
        raise InvalidRequestError(
            f"{param} is not audio: its {len(data)} bytes are in none of the formats {', '.join(FORMATS)}.", param=param
        )
    try:
        import soundfile  # type: ignore[import-not-found,import-untyped,unused-ignore]  # optional: an extra
    except (ImportError, OSError) as exc:  # OSError: without libsndfile
        raise UnsupportedError(
            f"{param} is compressed, and this server reads plain WAV only: {exc}. Install octavo[audio] there, or send "
            "WAV.",
            param=param,
        ) from None
    try:
        with soundfile.SoundFile(io.BytesIO(data)) as file:
            _check_length(file.frames / file.samplerate, max_seconds, param)
            return np.concatenate([*_blocks(file, max_seconds, param)]), file.samplerate
    except InvalidRequestError:
        raise
    except Exception as exc:  # the library raises several types
        raise InvalidRequestError(f"{param} is damaged audio: {exc}. Send it again.", param=param) from None


def _blocks(file: Any, max_seconds: float, param: str) -> Iterator[NDArray[np.float32]]:
    """Yield one channel, block by block: files can state another length than they have."""
    count = 0
    while True:
        block = file.read(_BLOCK, dtype="float32", always_2d=True)
        yield block.mean(axis=1)
        count += len(block)
        _check_length(count / file.samplerate, max_seconds, param)
        if len(block) < _BLOCK:
            return


def _begins_mpeg(data: bytes) -> bool:
    return len(data) > 1 and data[0] == 0xFF and data[1] & 0xE0 == 0xE0


def _check_length(seconds: float, most: float, param: str) -> None:
    if seconds > most:
        raise InvalidRequestError(
            f"{param} is {seconds:.1f} seconds long; audio may have {most:g} (--max-audio-seconds). Send a shorter "
            "piece.",
            param=param,
            value=round(seconds, 3),
        )
