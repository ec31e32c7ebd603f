"""A picture of the whole and tiles of it at the best of some sizes: LLaVA-NeXT
(https://llava-vl.github.io/blog/2024-01-30-llava-next/) and LLaVA-OneVision (https://arxiv.org/abs/2408.03326)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import starmap
from typing import TYPE_CHECKING, Any

import numpy as np

from octavo.core.errors import ConfigError
from octavo.features.media.processors.base import (
    BICUBIC,
    NORMALIZING,
    Item,
    LoadTokenizer,
    Piece,
    Processor,
    Run,
    digits,
    edges,
    resized,
)

if TYPE_CHECKING:
    from PIL.Image import Image

_SLACK = 1.1
_SIZES = [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]


class AnyresProcessor(Processor):
    """An image is one item: the whole picture, then its tiles row by row.

    Rows and columns of patches that are mostly padding are dropped, and each row of patches ends with one more
    embedding. LLaVA-OneVision also downscales the patches of large images.

    The item's layout: rows of tiles, rows and columns of patches without padding, and both after downscaling.
    """

    fields = NORMALIZING | {"size", "crop_size", "resample", "image_grid_pinpoints"}

    def __init__(self, config: Mapping[str, Any], processor: Mapping[str, Any], tokenizer: LoadTokenizer) -> None:
        vision = config["vision_config"]
        self._side, patch = digits(vision, "image_size", 224), digits(vision, "patch_size", 32)
        clip = vision.get("model_type") == "clip_vision_model"
        size = edges(processor.get("size") or {"shortest_edge": 224}, "size")
        crop = edges(processor["crop_size"], "crop_size") if processor.get("crop_size") else {}
        if {*size.values(), *crop.values()} != {self._side}:
            raise ConfigError(
                f"The model's preprocessor has size={size} and crop_size={crop}, and its vision_config "
                f"image_size={self._side}. Octavo supports pictures of that size."
            )
        strategy = "default" if clip else "full"  # one leaves out the first state: CLIP's is no patch
        if config.get("vision_feature_select_strategy", strategy) != strategy:
            raise ConfigError(f"The model's config has another vision_feature_select_strategy than {strategy!r}.")
        ratio = str(config.get("vision_aspect_ratio") or "")
        self._most_tiles = int(ratio.removeprefix("anyres_max_")) if ratio else 0
        stated = processor.get("image_grid_pinpoints") or config.get("image_grid_pinpoints") or _SIZES
        self._sizes = [(int(height), int(width)) for height, width in stated]
        if any(edge < self._side or edge % self._side for size in self._sizes for edge in size):
            raise ConfigError(
                f"The model's preprocessor has image_grid_pinpoints={stated!r}; Octavo supports multiples of "
                f"{self._side}, the size of a tile."
            )
        self._patches = self._side // patch
        self._resample = int(processor.get("resample", BICUBIC))
        self.token = int(config.get("image_token_index") or config.get("image_token_id") or 32000)

    @property
    def most(self) -> int:
        grids = [
            (height // self._side * self._patches, width // self._side * self._patches) for height, width in self._sizes
        ]
        return self._patches**2 + max(rows * (columns + 1) for rows, columns in starmap(self._left, grids))

    def pieces(self, image: Image, *, coarse: bool) -> Sequence[Piece]:
        pixels, side = np.asarray(image), self._side
        sizes = sorted(self._sizes, key=math.prod)[:1] if coarse else self._sizes
        height, width = _best(image.height, image.width, sizes)
        canvas = np.zeros((height, width, 3), dtype=np.uint8)
        own_height, own_width = _inside(image.height, image.width, height, width)
        top, left = (height - own_height) // 2, (width - own_width) // 2
        inner = resized(pixels, own_height, own_width, self._resample)
        canvas[top : top + own_height, left : left + own_width] = inner
        rows, columns = height // side, width // side
        tiles = canvas.reshape(rows, side, columns, side, 3).swapaxes(1, 2).reshape(-1, side, side, 3)
        whole = resized(pixels, side, side, self._resample)
        kept = self._kept(image.height, image.width, rows * self._patches, columns * self._patches)
        ends = self._left(*kept)
        count = self._patches**2 + ends[0] * (ends[1] + 1)
        item = Item(np.concatenate([whole[None], tiles]), count, (rows, *kept, *ends))
        return [Run(item, 0, count)]

    def _left(self, rows: int, columns: int) -> tuple[int, int]:
        """Return the rows and columns after downscaling, which applies if there are more than `_most_tiles` tiles."""
        if not self._most_tiles:
            return rows, columns
        ratio = math.sqrt(rows * columns / (self._most_tiles * self._patches**2))
        return (int(rows // ratio), int(columns // ratio)) if ratio > _SLACK else (rows, columns)

    def _kept(self, height: int, width: int, rows: int, columns: int) -> tuple[int, int]:
        """Return the rows and columns of patches without padding, which is equal on both sides."""
        if width / height > columns / rows:
            inside = int(round(height * (columns / width), 7))
            return rows - (rows - inside) // 2 * 2, columns
        inside = int(round(width * (rows / height), 7))
        return rows, columns - (columns - inside) // 2 * 2


def _best(height: int, width: int, sizes: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """Return the size that keeps most of the image's pixels, and of those the one with least padding."""

    def rank(size: tuple[int, int]) -> tuple[int, int]:
        scale = min(size[1] / width, size[0] / height)
        kept = min(int(width * scale) * int(height * scale), width * height)
        return -kept, math.prod(size) - kept

    return min(sizes, key=rank)


def _inside(height: int, width: int, most_height: int, most_width: int) -> tuple[int, int]:
    """Return the image's size when it fills one edge of a larger one."""
    across, down = most_width / width, most_height / height
    if across < down:
        return min(math.ceil(height * across), most_height), most_width
    return most_height, min(math.ceil(width * down), most_width)
