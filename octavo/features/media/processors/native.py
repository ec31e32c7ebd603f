"""Images in their own shape: Qwen2-VL (https://arxiv.org/abs/2409.12191), Qwen2.5-VL (https://arxiv.org/abs/2502.13923),
Qwen3-VL (https://arxiv.org/abs/2511.21631) and Qwen3.5."""

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
    Processor,
    Run,
    TooOddError,
    digits,
    edges,
    resized,
    switch,
)

if TYPE_CHECKING:
    from PIL.Image import Image

MOST_RATIO = 200
_COARSE_PIXELS = 512 * 512


class NativeProcessor(Processor):
    """Resize to whole groups of patches, which become an embedding each; their number is within bounds."""

    fields = NORMALIZING | {"do_resize", "size", "resample", "min_pixels", "max_pixels", "patch_size", "merge_size"}

    def __init__(self, config: Mapping[str, Any], processor: Mapping[str, Any], tokenizer: LoadTokenizer) -> None:
        vision = config["vision_config"]
        self.token = int(config.get("image_token_id", 151655))
        begin, end = config.get("vision_start_token_id", 151652), config.get("vision_end_token_id", 151653)
        self.around = [int(begin)], [int(end)]
        patch, merged = digits(processor, "patch_size", 14), digits(processor, "merge_size", 2)
        usual = 16 if config["architectures"][0].startswith("Qwen3") else 14
        own = digits(vision, "patch_size", usual), digits(vision, "spatial_merge_size", 2)
        if (patch, merged) != own:
            raise ConfigError(
                f"The model's preprocessor has patch_size={patch} and merge_size={merged}, and its vision_config "
                f"patch_size={own[0]} and spatial_merge_size={own[1]}. Get the files that belong together."
            )
        self._edge = patch * merged
        self._resample = int(processor.get("resample", BICUBIC))
        if not switch(processor, "do_resize", default=True):
            raise ConfigError("The model's preprocessor has do_resize=false; Octavo supports true only.")
        size = edges(processor.get("size") or {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280}, "size")
        least, limit = ("min_pixels", "shortest_edge", 56 * 56), ("max_pixels", "longest_edge", 28 * 28 * 1280)
        self._least, self._limit = (
            digits(processor, name, size.get(name, size.get(edge, default))) for name, edge, default in (least, limit)
        )

    @property
    def most(self) -> int:
        return max(self._limit, self._least) // self._edge**2 + 1

    def pieces(self, image: Image, *, coarse: bool) -> Sequence[Piece]:
        limit = max(self._least, min(self._limit, _COARSE_PIXELS)) if coarse else self._limit
        height, width = self._target(image.height, image.width, limit)
        pixels = resized(np.asarray(image), height, width, self._resample)
        rows, columns = height // self._edge, width // self._edge
        item = Item(pixels[None], rows * columns, (rows, columns))
        return [Run(item, 0, item.count)]

    def _target(self, height: int, width: int, limit: int) -> tuple[int, int]:
        """Return a size of whole groups of patches, near the image's ratio, and within the bounds of pixels."""
        if max(height, width) / min(height, width) > MOST_RATIO:
            raise TooOddError(
                f"is {width} x {height} pixels; the longer edge may be at most {MOST_RATIO} times the shorter one"
            )
        return near(height, width, self._edge, self._least, limit)


def near(height: int, width: int, edge: int, least: int, most: int) -> tuple[int, int]:
    """Return a size of whole edges, near the ratio, and within bounds of pixels."""
    high, wide = round(height / edge) * edge, round(width / edge) * edge
    if high * wide > most:
        scale = math.sqrt(height * width / most)
        high = max(edge, math.floor(height / scale / edge) * edge)
        wide = max(edge, math.floor(width / scale / edge) * edge)
    elif high * wide < least:
        scale = math.sqrt(least / (height * width))
        high, wide = math.ceil(height * scale / edge) * edge, math.ceil(width * scale / edge) * edge
    return high, wide
