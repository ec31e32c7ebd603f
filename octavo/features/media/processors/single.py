"""One picture of one size for each image: CLIP, SigLIP, LLaVA 1.5 (https://arxiv.org/abs/2310.03744)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from octavo.core.errors import ConfigError
from octavo.features.media.processors.base import (
    BICUBIC,
    NORMALIZING,
    Item,
    LoadTokenizer,
    Piece,
    Pixels,
    Processor,
    Run,
    digits,
    edges,
    resized,
    switch,
)

if TYPE_CHECKING:
    from PIL.Image import Image

_CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)


class SingleProcessor(Processor):
    """Resize, and crop the middle. An image is as many placeholders as it has patches."""

    fields = NORMALIZING | {"do_resize", "size", "resample", "do_center_crop", "crop_size", "do_pad"}

    def __init__(self, config: Mapping[str, Any], processor: Mapping[str, Any], tokenizer: LoadTokenizer) -> None:
        self.token = int(config.get("image_token_index") or config.get("image_token_id") or 32000)
        vision = config["vision_config"]
        clip = vision.get("model_type") == "clip_vision_model"
        self._patch = digits(vision, "patch_size", 32 if clip else 16)
        side = digits(vision, "image_size", 224)
        kind = str(processor.get("image_processor_type", "")).removesuffix("Fast").removesuffix("Pil")
        plain = kind.startswith("Siglip")
        self._resample = int(processor.get("resample", BICUBIC))
        size = processor.get("size", {"height": 224, "width": 224} if plain else {"shortest_edge": 224})
        self._resizes, self._crops = (
            switch(processor, "do_resize", default=True),
            switch(processor, "do_center_crop", default=not plain),
        )
        # Early checkpoints state the shortest edge as a number; SigLIP's is of both edges.
        self._size = {"shortest_edge": size} if isinstance(size, int) and not plain else edges(size, "size")
        self._crop = edges(processor.get("crop_size", 224), "crop_size")
        self._pads = kind.startswith("Llava") and switch(processor, "do_pad", default=False)
        self._fill = [int(mean * 255) for mean in processor.get("image_mean") or _CLIP_MEAN]
        final = self._crop if self._crops else self._size
        if (final.get("height"), final.get("width")) != (side, side):
            raise ConfigError(
                f"The model's preprocessor makes images of {final}, and its vision_config has image_size={side}. "
                "Octavo supports square images of that size."
            )
        skips = config.get("vision_feature_select_strategy", "default") == "default"
        if skips and not clip:
            raise ConfigError(
                "The model's config has vision_feature_select_strategy='default', which leaves out the first state, "
                "and SigLIP's is of a patch. Octavo supports 'full' for it."
            )
        self._count: int = (side // self._patch) ** 2 + int(clip and not skips)

    @property
    def most(self) -> int:
        return self._count

    def pieces(self, image: Image, *, coarse: bool) -> Sequence[Piece]:
        pixels = np.asarray(image)
        if self._pads:
            pixels = self._squared(pixels)
        if self._resizes:
            pixels = resized(pixels, *self._target(pixels.shape[0], pixels.shape[1]), self._resample)
        if self._crops:
            pixels = center_crop(pixels, self._crop["height"], self._crop["width"])
        item = Item(pixels[None], self._count)
        return [Run(item, 0, item.count)]

    def _target(self, height: int, width: int) -> tuple[int, int]:
        short = self._size.get("shortest_edge")
        if short is None:
            return self._size["height"], self._size["width"]
        long = int(short * max(height, width) / min(height, width))
        return (long, short) if width <= height else (short, long)

    def _squared(self, pixels: Pixels) -> Pixels:
        """Pad to a square with the mean color."""
        height, width = pixels.shape[:2]
        if height == width:
            return pixels
        side = max(height, width)
        square = np.empty((side, side, 3), dtype=np.uint8)
        square[:] = self._fill
        top, left = (side - height) // 2, (side - width) // 2
        square[top : top + height, left : left + width] = pixels
        return square


def center_crop(pixels: Pixels, height: int, width: int) -> Pixels:
    """Return the middle; what is smaller is padded with black, as in Transformers."""
    own_height, own_width = pixels.shape[:2]
    top, left = (own_height - height) // 2, (own_width - width) // 2
    if top >= 0 and left >= 0:
        return pixels[top : top + height, left : left + width]
    high, wide = max(height, own_height), max(width, own_width)
    padded = np.zeros((high, wide, 3), dtype=np.uint8)
    above, before = math.ceil((high - own_height) / 2), math.ceil((wide - own_width) / 2)
    padded[above : above + own_height, before : before + own_width] = pixels
    top, left = max(0, top + above), max(0, left + before)
    return padded[top : top + height, left : left + width]
