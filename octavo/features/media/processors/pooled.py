"""One square picture for each image, whose patches are averaged: Gemma 3 (https://arxiv.org/abs/2503.19786)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from octavo.core.errors import ConfigError
from octavo.features.media.processors.base import (
    BILINEAR,
    NORMALIZING,
    Item,
    LoadTokenizer,
    Piece,
    Processor,
    Run,
    digits,
    edges,
    resized,
    switch,
)

if TYPE_CHECKING:
    from PIL.Image import Image

_LINES = "\n\n"


class PooledProcessor(Processor):
    """Resize to a square, whatever the image's ratio. Tokens begin and end each image, between empty lines."""

    fields = NORMALIZING | {"do_resize", "size", "resample", "do_pan_and_scan"}

    def __init__(self, config: Mapping[str, Any], processor: Mapping[str, Any], tokenizer: LoadTokenizer) -> None:
        vision = config["vision_config"]
        side, patch = digits(vision, "image_size", 224), digits(vision, "patch_size", 16)
        self._count = digits(config, "mm_tokens_per_image", 256)
        if side % patch or (side // patch) % math.isqrt(self._count) or math.isqrt(self._count) ** 2 != self._count:
            raise ConfigError(
                f"The model's config has mm_tokens_per_image={self._count}, and its vision_config image_size={side} "
                f"and patch_size={patch}. Octavo supports squares of whole patches for each token."
            )
        if switch(processor, "do_pan_and_scan", default=False):
            raise ConfigError(
                "The model's preprocessor has do_pan_and_scan=true, which adds crops of an image; Octavo supports "
                "false only."
            )
        if not switch(processor, "do_resize", default=True):
            raise ConfigError("The model's preprocessor has do_resize=false; Octavo supports true only.")
        size = edges(processor.get("size") or {"height": 224, "width": 224}, "size")
        if (size.get("height"), size.get("width")) != (side, side):
            raise ConfigError(
                f"The model's preprocessor makes images of {size}, and its vision_config has image_size={side}. "
                "Octavo supports square images of that size."
            )
        self._side = side
        self._resample = int(processor.get("resample", BILINEAR))
        self.token = int(config.get("boi_token_index") or 255999)
        self._end = int(config.get("eoi_token_index") or 256000)
        self._tokenizer = tokenizer

    @property
    def most(self) -> int:
        return self._count

    @property
    def around(self) -> tuple[list[int], list[int]]:  # type: ignore[override]  # it takes the tokenizer
        lines = self._tokenizer().encode(_LINES, add_special_tokens=False)
        return lines, [self._end, *lines]

    @property
    def frame(self) -> tuple[str, str]:
        return _LINES, self._tokenizer().token_text(self._end) + _LINES

    def pieces(self, image: Image, *, coarse: bool) -> Sequence[Piece]:
        item = Item(resized(np.asarray(image), self._side, self._side, self._resample)[None], self._count)
        return [[self.token], Run(item, 0, item.count)]
