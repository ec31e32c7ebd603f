"""Files and arrays of sound become samples of one channel at 16 kHz."""

from __future__ import annotations

import io
import struct
import wave
from typing import Any

import numpy as np
import pytest
from audio_kit import sound, wav
from numpy.typing import NDArray

from octavo.core.errors import InvalidRequestError, UnsupportedError
from octavo.features.media.audio.decode import converted, decoded
from octavo.features.media.audio.resample import resampled

SOUND = sound(0.3)


def pcm(samples: NDArray[Any], bytes_each: int, rate: int = 16000) -> bytes:
    """A file by the standard library."""
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setnchannels(1 if samples.ndim == 1 else samples.shape[1])
        out.setsampwidth(bytes_each)
        out.setframerate(rate)
        if bytes_each == 1:
            data = np.round(samples * 127 + 128).astype(np.uint8).tobytes()
        else:
            whole = np.round(samples.astype(np.float64) * (2 ** (8 * bytes_each - 1) - 1)).astype("<i8")
            data = whole.ravel().view(np.uint8).reshape(-1, 8)[:, :bytes_each].tobytes()
        out.writeframes(data)
    return file.getvalue()


def read(data: bytes, seconds: float = 60.0) -> NDArray[np.float32]:
    return decoded(data, seconds, "file")


@pytest.mark.parametrize("bytes_each", [1, 2, 3, 4])
def test_integers_of_each_size(bytes_each: int) -> None:
    np.testing.assert_allclose(read(pcm(SOUND, bytes_each)), SOUND, atol=2.0 ** (2 - 8 * bytes_each) + 1e-7)


def test_floats_lose_nothing() -> None:
    assert (read(wav(SOUND)) == SOUND).all()
    with_pairs = np.stack([SOUND, -SOUND / 2], axis=1)
    np.testing.assert_allclose(read(wav(with_pairs)), SOUND / 4, atol=1e-7)


def test_an_extensible_header_and_other_chunks() -> None:
    plain = wav(SOUND)
    body = plain[plain.index(b"data") :]
    guid = struct.pack("<H", 3) + bytes.fromhex("000000001000800000aa00389b71")
    form = struct.pack("<HHIIHHHHI", 0xFFFE, 1, 16000, 64000, 4, 32, 22, 32, 4) + guid
    more = b"LIST" + struct.pack("<I", 3) + b"abc\0" + b"fmt " + struct.pack("<I", len(form)) + form
    assert (read(b"RIFF" + struct.pack("<I", 0) + b"WAVE" + more + body) == SOUND).all()


def test_a_file_that_was_cut_off_has_what_it_has() -> None:
    assert (read(wav(SOUND)[:-1002]) == SOUND[: len(read(wav(SOUND)[:-1002]))]).all()
    assert len(read(wav(SOUND)[:-1002])) == len(SOUND) - 251


@pytest.mark.parametrize("rate", [8000, 11025, 22050, 44100, 48000, 96000, 44101])
@pytest.mark.parametrize("hertz", [100, 1000, 3400])
def test_tones_at_other_rates(rate: int, hertz: int) -> None:
    given = np.sin(2 * np.pi * hertz * np.arange(rate // 2) / rate).astype(np.float32)
    found = resampled(given, rate, 16000)
    assert len(found) == -(-len(given) * 16000 // rate)
    expected = np.sin(2 * np.pi * hertz * np.arange(len(found)) / 16000)
    inner = slice(500, -500)  # at the ends, silence is assumed
    np.testing.assert_allclose(found[inner], expected[inner], atol=2e-5)


def test_what_the_new_rate_can_not_hold_is_left_out() -> None:
    given = np.sin(2 * np.pi * 9000 * np.arange(22050) / 44100).astype(np.float32)
    assert np.abs(resampled(given, 44100, 16000)[500:-500]).max() < 1e-4


def test_arrays() -> None:
    pair = np.stack([SOUND, SOUND * 0], axis=1)
    np.testing.assert_allclose(converted((pair, 16000), 60.0, "p"), SOUND / 2, atol=1e-7)
    whole = np.round(SOUND * 32768).astype(np.int16)
    np.testing.assert_allclose(converted([whole, 16000.0], 60.0, "p"), SOUND, atol=4e-5)
    assert len(converted((SOUND.astype(np.float64), 32000), 60.0, "p")) == len(SOUND) // 2


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (SOUND, "p must be a pair (NumPy array, sampling rate), got ndarray"),
        ((SOUND, None), "must be a pair"),
        ((SOUND.tolist(), 16000), "must be a pair"),
        ((SOUND[None, None], 16000), "[samples] or [samples, channels]"),
        ((SOUND.astype(np.uint8), 16000), "of uint8"),
        ((SOUND, 0), "has 0 samples per second"),
        ((SOUND, 16000.5), "must be a whole number"),
        ((SOUND[:0], 16000), "has no samples"),
        ((SOUND * np.nan, 16000), "no finite numbers"),
        ((np.zeros(16000 * 3, np.float32), 16000), "is 3.0 seconds long; audio may have 2 (--max-audio-seconds)"),
    ],
)
def test_arrays_that_are_refused(given: Any, says: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        converted(given, 2.0, "p")
    assert says in caught.value.message
    assert caught.value.param == "p"


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"no sound", "file is not audio: its 8 bytes are in none of the formats WAV, FLAC, OGG, MP3"),
        (wav(SOUND)[:36], "can't be read: it has no samples"),
        (b"RIFF0000WAVEdata\x04\0\0\0abcd", "its samples come before their format"),
        (b"RIFF0000WAVEfmt \x04\0\0\0abcd", "its format is incomplete"),
        (wav(np.zeros((3, 0), np.float32)), "it has 0 channels"),
        (wav(SOUND[:0]), "has no samples"),
        (wav(np.zeros(16000 * 3, np.float32)), "is 3.0 seconds long; audio may have 2"),
    ],
)
def test_files_that_are_refused(data: bytes, says: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        read(data, 2.0)
    assert says in caught.value.message


def test_without_the_library_compressed_files_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "soundfile", None)
    with pytest.raises(UnsupportedError, match=r"Install octavo\[audio\] there, or send WAV"):
        read(b"fLaC" + bytes(50))


@pytest.mark.parametrize(("form", "error"), [("FLAC", 1e-4), ("OGG", 0.2), ("MP3", 0.2), ("WAVEX", 1e-4)])
def test_compressed_files(form: str, error: float) -> None:
    soundfile = pytest.importorskip("soundfile", reason="needs the library soundfile (octavo[audio])")
    file = io.BytesIO()
    tone = (0.5 * np.sin(2 * np.pi * 440 * np.arange(24000) / 24000)).astype(np.float32)
    soundfile.write(file, np.stack([tone, tone], axis=1), 24000, format=form)
    found = read(file.getvalue())
    expected = 0.5 * np.sin(2 * np.pi * 440 * np.arange(len(found)) / 16000)
    np.testing.assert_allclose(found[3000:12000], expected[3000:12000], atol=error)
    with pytest.raises(InvalidRequestError, match=r"seconds long; audio may have 0\.5"):
        read(file.getvalue(), 0.5)
    with pytest.raises(InvalidRequestError, match=r"damaged audio|seconds long|no samples|can't be read"):
        read(file.getvalue()[:60] if form != "MP3" else b"ID3" + bytes(60))
