"""Tiles in the grid that is nearest to the image's shape, and a smaller picture of the whole: InternVL
(https://arxiv.org/abs/2404.16821, section 3.3)."""

from __future__ import annotations

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
    edge,
    edges,
    one_token,
    resized,
)

if TYPE_CHECKING:
    from PIL.Image import Image


class GridProcessor(Processor):
    """Each tile is an item; all of an image follow each other between two marks."""

    fields = NORMALIZING | {"size", "resample", "min_patches", "max_patches"}

    def __init__(self, config: Mapping[str, Any], processor: Mapping[str, Any], tokenizer: LoadTokenizer) -> None:
        vision = config["vision_config"]
        side, patch = edge(vision, "image_size", 448), edge(vision, "patch_size", 14)
        size = edges(processor.get("size") or {"height": 384, "width": 384}, "size")
        if (size.get("height"), size.get("width")) != (side, side):
            raise ConfigError(
                f"The model's preprocessor makes tiles of {size}, and its vision_config has image_size={side}. Octavo "
                "supports square tiles of that size."
            )
        self._side = side
        self._count = int((side // patch * float(config.get("downsample_ratio", 0.5))) ** 2)
        self._resample = int(processor.get("resample", BICUBIC))
        most = digits(processor, "max_patches", 12)
        least = min(digits(processor, "min_patches", 1), most)
        grids = [(rows, columns) for columns in range(1, most + 1) for rows in range(1, most + 1)]
        fitting = [(rows, columns) for rows, columns in grids if least <= rows * columns <= most]
        self._grids = sorted(fitting, key=lambda grid: grid[0] * grid[1])
        self.token = int(config.get("image_token_id", 151667))
        self._begin, self._end = one_token(tokenizer, "<img>"), one_token(tokenizer, "</img>")

    @property
    def most(self) -> int:
        return self._count

    def pieces(self, image: Image, *, coarse: bool) -> Sequence[Piece]:
        pixels, side = np.asarray(image), self._side
        rows, columns = (1, 1) if coarse else self._grid(image.height, image.width)
        whole = resized(pixels, rows * side, columns * side, self._resample)
        tiles = [
            whole[row * side : (row + 1) * side, column * side : (column + 1) * side]
            for row in range(rows)
            for column in range(columns)
        ]
        if len(tiles) > 1:
            tiles.append(resized(pixels, side, side, self._resample))
        return [[self._begin], *map(self._run, tiles), [self._end]]

    def _run(self, tile: Pixels) -> Run:
        item = Item(np.ascontiguousarray(tile)[None], self._count)
        return Run(item, 0, item.count)

    def _grid(self, height: int, width: int) -> tuple[int, int]:
        """Return (rows, columns): the nearest aspect ratio, with the most tiles that the image fills at least half."""
        nearest, best = float("inf"), (1, 1)
        for rows, columns in self._grids:
            away = abs(width / height - columns / rows)
            fills = width * height > 0.5 * self._side**2 * rows * columns
            if away < nearest or (away == nearest and fills):
                nearest, best = away, (rows, columns)
        return best
