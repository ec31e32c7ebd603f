"""Tiles and a smaller picture of the whole: Idefics 3 (https://arxiv.org/abs/2408.12637) and SmolVLM
(https://arxiv.org/abs/2504.05299)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from octavo.core.errors import ConfigError
from octavo.features.media.processors.base import (
    LANCZOS,
    NORMALIZING,
    Item,
    LoadTokenizer,
    Piece,
    Pixels,
    Processor,
    Run,
    digits,
    edges,
    one_token,
    resized,
    switch,
)

if TYPE_CHECKING:
    from PIL.Image import Image

MOST_EDGE = 4096
_AROUND, _WHOLE = "<fake_token_around_image>", "<global-img>"


class TiledProcessor(Processor):
    """Each tile is an item of its own, after tokens with its row and column."""

    fields = NORMALIZING | {"do_resize", "size", "resample", "do_image_splitting", "max_image_size"}

    def __init__(self, config: Mapping[str, Any], processor: Mapping[str, Any], tokenizer: LoadTokenizer) -> None:
        vision = config["vision_config"]
        side = digits(vision, "image_size", 224)
        patch = digits(vision, "patch_size", 32)
        self._tile = edges(processor.get("max_image_size", {"longest_edge": 364}), "max_image_size").get("longest_edge")
        if self._tile != side or side % patch:
            raise ConfigError(
                f"The model's preprocessor has tiles of {self._tile} pixels, and its vision_config image_size={side} "
                f"and patch_size={patch}. Octavo supports tiles of that size, in whole patches."
            )
        scale = digits(config, "scale_factor", 2)
        self._count = int((side // patch) ** 2 / scale**2)
        self._resample = int(processor.get("resample", LANCZOS))
        self._size = edges(processor.get("size", {"longest_edge": 4 * 364}), "size")
        self._resizes = switch(processor, "do_resize", default=True)
        self._splits = switch(processor, "do_image_splitting", default=True)
        self._tokenizer = tokenizer
        self.token = int(config.get("image_token_id") or one_token(tokenizer, "<image>"))

    @property
    def most(self) -> int:
        return self._count

    def pieces(self, image: Image, *, coarse: bool) -> Sequence[Piece]:
        pixels, tile = np.asarray(image), self._tile
        assert tile is not None
        if self._resizes:
            pixels = self._resized(pixels, *self._target(pixels.shape[0], pixels.shape[1]))
        if coarse or not self._splits:
            return self._whole(self._resized(pixels, tile, tile), "")
        pixels = self._resized(pixels, *_multiples(pixels.shape[0], pixels.shape[1], tile))
        rows, columns = pixels.shape[0] // tile, pixels.shape[1] // tile
        if (rows, columns) == (1, 1):
            return self._whole(pixels, "")
        pieces: list[Piece] = []
        end = ""  # texts between special tokens are tokenized as one, as in a prompt
        for row in range(rows):
            for column in range(columns):
                part = pixels[row * tile : (row + 1) * tile, column * tile : (column + 1) * tile]
                pieces += self._placed(part, f"{end}{_AROUND}<row_{row + 1}_col_{column + 1}>")
                end = ""
            end = "\n"
        return pieces + self._whole(self._resized(pixels, tile, tile), "\n\n")

    def _whole(self, pixels: Pixels, before: str) -> list[Piece]:
        return [*self._placed(pixels, f"{before}{_AROUND}{_WHOLE}"), self._tokens(_AROUND)]

    def _placed(self, pixels: Pixels, before: str) -> list[Piece]:
        item = Item(np.ascontiguousarray(pixels)[None], self._count)
        return [self._tokens(before), Run(item, 0, item.count)]

    def _tokens(self, text: str) -> list[int]:
        return self._tokenizer().encode(text, add_special_tokens=False)

    def _resized(self, pixels: Pixels, height: int, width: int) -> Pixels:
        return resized(pixels, height, width, self._resample)

    def _target(self, height: int, width: int) -> tuple[int, int]:
        """Return the size with the longest edge that is stated, its other edge even."""
        long = self._size.get("longest_edge")
        if long is None:
            return self._size["height"], self._size["width"]
        ratio = width / height
        if width >= height:
            width = long
            height = even(int(width / ratio))
        else:
            height = long
            width = even(int(height * ratio))
        height, width = max(height, 1), max(width, 1)
        ratio = width / height
        if width >= height and width > MOST_EDGE:
            width = MOST_EDGE
            height = int(width / ratio)
        elif height > width and height > MOST_EDGE:
            height = MOST_EDGE
            width = int(height * ratio)
        return max(height, 1), max(width, 1)


def even(value: int) -> int:
    return value + value % 2


def _multiples(height: int, width: int, tile: int) -> tuple[int, int]:
    """Return a size of whole tiles."""
    ratio = width / height
    if width >= height:
        width = math.ceil(width / tile) * tile
        height = math.ceil(int(width / ratio) / tile) * tile
    else:
        height = math.ceil(height / tile) * tile
        width = math.ceil(int(height * ratio) / tile) * tile
    return max(height, tile), max(width, tile)
