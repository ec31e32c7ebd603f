"""Image files as they are decoded, and those that are refused."""

from __future__ import annotations

import io
import struct
import zlib
from typing import Any

import numpy as np
import pytest
from image_kit import picture
from PIL import Image

from octavo.core.errors import InvalidRequestError
from octavo.features.media.decode import FORMATS, decoded

IMAGE = picture(40, 31)


def file_of(image: Image.Image, kind: str = "PNG", **more: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **more)
    return file.getvalue()


def refusal(data: bytes, most: int = 10**6) -> str:
    with pytest.raises(InvalidRequestError) as caught:
        decoded(data, most, "url")
    assert caught.value.param == "url"
    return caught.value.message


@pytest.mark.parametrize("kind", FORMATS)
def test_formats(kind: str) -> None:
    exact = {"lossless": True} if kind == "WEBP" else {}
    found = np.asarray(decoded(file_of(IMAGE, kind, **exact), 10**6, "url"))
    assert found.shape == (31, 40, 3)
    near = 40 if kind in ("JPEG", "GIF") else 0
    assert np.abs(found.astype(int) - np.asarray(IMAGE)).mean() <= near


def test_photographs_are_turned() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by a quarter
    found = decoded(file_of(IMAGE, exif=exif.tobytes()), 10**6, "url")
    assert np.array_equal(np.asarray(found), np.asarray(IMAGE.rotate(-90, expand=True)))


def test_the_first_picture_of_an_animation() -> None:
    second = picture(40, 31, seed=9)
    data = file_of(IMAGE, "GIF", save_all=True, append_images=[second])
    assert np.array_equal(
        np.asarray(decoded(data, 10**6, "url")), np.asarray(decoded(file_of(IMAGE, "GIF"), 10**6, ""))
    )


def test_a_bomb_is_refused_before_it_is_decoded() -> None:
    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = chunk(b"IHDR", struct.pack(">IIBBBBB", 60_000, 60_000, 8, 2, 0, 0, 0))
    png = b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", zlib.compress(bytes(100)))
    assert "url has more pixels than the 1,000,000 that images may have" in refusal(png)
    assert "url has 40 x 31 pixels; images may have 1,000" in refusal(file_of(IMAGE), 1000)


def test_damaged_files() -> None:
    whole = file_of(IMAGE)
    assert "url is a damaged image" in refusal(whole[: len(whole) // 2])
    assert "url is not an image: its 0 bytes" in refusal(b"")
    assert "url is not an image" in refusal(file_of(IMAGE, "PPM")), "a format that is not read"
    assert "url is not an image" in refusal(b"<svg xmlns='http://www.w3.org/2000/svg'/>")
