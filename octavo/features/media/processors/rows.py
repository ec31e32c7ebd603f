"""Images in their own shape, row by row: Pixtral (https://arxiv.org/abs/2410.07073) and Mistral Small 3.1."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from octavo.features.media.processors.base import (
    BICUBIC,
    NORMALIZING,
    Item,
    LoadTokenizer,
    Piece,
    Processor,
    Run,
    digits,
    edge,
    edges,
    one_token,
    resized,
)

if TYPE_CHECKING:
    from PIL.Image import Image


class RowsProcessor(Processor):
    """An image is one item; a token ends each of its rows, and another one the image."""

    fields = NORMALIZING | {"size", "resample"}

    def __init__(self, config: Mapping[str, Any], processor: Mapping[str, Any], tokenizer: LoadTokenizer) -> None:
        patch = edge(config["vision_config"], "patch_size", 16)
        merged = digits(config, "spatial_merge_size", 2) if "spatial_merge_size" in config else 1
        self._edge = patch * merged
        size = edges(processor.get("size") or {"longest_edge": 1024}, "size")
        longest = size.get("longest_edge", 0)
        self._limits = size.get("height", longest), size.get("width", longest)
        self._resample = int(processor.get("resample", BICUBIC))
        self.token = int(config.get("image_token_index") or config.get("image_token_id") or 10)
        self._break, self._end = one_token(tokenizer, "[IMG_BREAK]"), one_token(tokenizer, "[IMG_END]")

    @property
    def most(self) -> int:
        return math.prod(-(-limit // self._edge) for limit in self._limits)

    def pieces(self, image: Image, *, coarse: bool) -> Sequence[Piece]:
        high, wide = (min(limit, 512) if coarse else limit for limit in self._limits)
        height, width = image.height, image.width
        ratio = max(height / high, width / wide)
        if ratio > 1:
            height, width = math.floor(height / ratio), math.floor(width / ratio)
        rows, columns = ((length - 1) // self._edge + 1 for length in (height, width))
        pixels = resized(np.asarray(image), rows * self._edge, columns * self._edge, self._resample)
        item = Item(pixels[None], rows * columns)
        pieces: list[Piece] = []
        for row in range(rows):
            pieces += [Run(item, row * columns, columns), [self._break if row + 1 < rows else self._end]]
        return pieces
