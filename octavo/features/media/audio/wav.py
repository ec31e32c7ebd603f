"""WAV files of plain samples (RIFF WAVE, Multimedia Programming Interface and Data Specifications 1.0)."""

from __future__ import annotations

import struct
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

_PCM, _FLOAT, _EXTENSIBLE = 1, 3, 0xFFFE


class WavError(ValueError):
    """A damaged file; the text says how."""


def is_wav(data: bytes) -> bool:
    return data[:4] in (b"RIFF", b"RIFX") and data[8:12] == b"WAVE"


def read_wav(data: bytes) -> tuple[NDArray[np.float32], int] | None:
    """Return the samples, [samples, channels] float32 from -1 to 1, and their rate; None for an encoding that is not
    read here: others than integers of 8 to 32 bits and floats.

    Raises:
        WavError: the file is damaged.
    """
    form: tuple[int, ...] = ()
    if data[:4] != b"RIFF":
        return None
    for name, body in _chunks(data):
        if name == b"fmt ":
            if len(body) < 16:
                raise WavError("its format is incomplete")
            form = struct.unpack("<HHIIHH", body[:16])
            if form[0] == _EXTENSIBLE and len(body) >= 26:
                form = (struct.unpack("<H", body[24:26])[0], *form[1:])
        if name == b"data":
            if not form:
                raise WavError("its samples come before their format")
            return _samples(body, form)
    raise WavError("it has no samples")


def _chunks(data: bytes) -> Iterator[tuple[bytes, memoryview]]:
    """Yield (name, content). The last may be cut off, as by a recorder that was stopped."""
    at, view = 12, memoryview(data)
    while at + 8 <= len(data):
        size = int.from_bytes(data[at + 4 : at + 8], "little")
        yield data[at : at + 4], view[at + 8 : at + 8 + size]
        at += 8 + size + size % 2


def _samples(body: memoryview, form: tuple[int, ...]) -> tuple[NDArray[np.float32], int] | None:
    kind, channels, rate, _, _, bits = form
    if channels < 1 or rate < 1:
        raise WavError(f"it has {channels} channels at {rate} Hz")
    read = {
        (_PCM, 8): _unsigned,
        (_PCM, 16): _signed16,
        (_PCM, 24): _signed24,
        (_PCM, 32): _signed32,
        (_FLOAT, 32): _float32,
        (_FLOAT, 64): _float64,
    }.get((kind, bits))
    if read is None:
        return None
    frame = channels * bits // 8
    count = len(body) // frame
    return read(body[: count * frame]).reshape(count, channels), rate


def _unsigned(body: memoryview) -> NDArray[np.float32]:
    return (np.frombuffer(body, np.uint8).astype(np.float32) - np.float32(128)) / np.float32(128)


def _signed16(body: memoryview) -> NDArray[np.float32]:
    return np.frombuffer(body, "<i2").astype(np.float32) / np.float32(2**15)


def _signed24(body: memoryview) -> NDArray[np.float32]:
    low, middle, high = (np.frombuffer(body, np.uint8)[place::3].astype(np.int32) for place in range(3))
    found = low | middle << 8 | high << 16
    return (np.where(found >= 2**23, found - 2**24, found) / 2**23).astype(np.float32)


def _signed32(body: memoryview) -> NDArray[np.float32]:
    return (np.frombuffer(body, "<i4") / 2**31).astype(np.float32)


def _float32(body: memoryview) -> NDArray[np.float32]:
    return np.frombuffer(body, "<f4").astype(np.float32)


def _float64(body: memoryview) -> NDArray[np.float32]:
    return np.frombuffer(body, "<f8").astype(np.float32)
