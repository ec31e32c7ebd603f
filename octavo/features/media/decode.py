"""Decode image files, within bounds."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

from octavo.core.errors import InvalidRequestError

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
"""Formats that are read; Pillow's readers of others are not needed, and so are no risk."""


def decoded(data: bytes, max_pixels: int, param: str) -> Image:
    """Return an image in RGB, turned as its metadata say. Of an animation, the first picture.

    Raises:
        InvalidRequestError: it is no image of `FORMATS`, is damaged, or has more than `max_pixels`, which is known
            before it is decoded.
    """
    from PIL import Image, ImageOps, UnidentifiedImageError  # imported here: only images need it

    try:
        opened = Image.open(io.BytesIO(data), formats=FORMATS)
        _check_size(opened.size, max_pixels, param)
        return in_rgb(ImageOps.exif_transpose(opened))
    except InvalidRequestError:
        raise
    except UnidentifiedImageError:
        raise InvalidRequestError(
            f"{param} is not an image: its {len(data)} bytes are in none of the formats {', '.join(FORMATS)}.",
            param=param,
        ) from None
    except Image.DecompressionBombError:
        raise InvalidRequestError(
            f"{param} has more pixels than the {max_pixels:,} that images may have (--max-image-pixels). Send a "
            "smaller one.",
            param=param,
        ) from None
    except Exception as exc:  # damaged files raise many types
        raise InvalidRequestError(f"{param} is a damaged image: {exc}. Send it again.", param=param) from None


def converted(given: Any, max_pixels: int, param: str) -> Image:
    """Return an object of Python in RGB: a Pillow image, or a NumPy array [height, width, 3] of uint8.

    Raises:
        InvalidRequestError: it is neither, or too large.
    """
    import numpy as np
    from PIL import Image

    if isinstance(given, np.ndarray):
        if given.dtype != np.uint8 or given.ndim != 3 or given.shape[2] != 3:
            raise InvalidRequestError(
                f"{param} must be an array [height, width, 3] of uint8, got {list(given.shape)} of {given.dtype}.",
                param=param,
            )
        given = Image.fromarray(given)
    if not isinstance(given, Image.Image):
        raise InvalidRequestError(
            f"{param} must be a PIL image, or a NumPy array [height, width, 3] of uint8, got {type(given).__name__}.",
            param=param,
        )
    _check_size(given.size, max_pixels, param)
    return in_rgb(given)


def in_rgb(image: Image) -> Image:
    """Convert to RGB; what is transparent becomes white, as in Transformers."""
    from PIL import Image as Pillow

    if "A" not in image.getbands() and image.info.get("transparency") is None:
        return image.convert("RGB")
    image = image.convert("RGBA")
    white = Pillow.new("RGBA", image.size, (255, 255, 255, 255))
    return Pillow.alpha_composite(white, image).convert("RGB")


def _check_size(size: tuple[int, int], max_pixels: int, param: str) -> None:
    width, height = size
    if width < 1 or height < 1:
        raise InvalidRequestError(f"{param} has no pixels: it is {width} x {height}.", param=param)
    if width * height > max_pixels:
        raise InvalidRequestError(
            f"{param} has {width} x {height} pixels; images may have {max_pixels:,} (--max-image-pixels). Send a "
            "smaller one.",
            param=param,
            value=width * height,
        )
