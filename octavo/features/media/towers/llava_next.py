"""LLaVA-NeXT (https://llava-vl.github.io/blog/2024-01-30-llava-next/) and LLaVA-OneVision
(https://arxiv.org/abs/2408.03326): LLaVA's tower on the whole image and its tiles, whose patches are put together
again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from octavo.features.media.towers.layers import Table
from octavo.features.media.towers.llava import LlavaTower
from octavo.features.media.towers.tower import Encoding
from octavo.nn.build import Build


class LlavaNextTower(LlavaTower):
    names: tuple[tuple[str, str], ...] = (*LlavaTower.names, (r"(model\.)?image_newline$", "newline"))

    def __init__(self, config: Mapping[str, Any], processor: Mapping[str, Any], b: Build) -> None:
        super().__init__(config, processor, b)
        self.newline = Table(b, "newline", self.hidden_size)
        sizes = processor.get("image_grid_pinpoints") or config.get("image_grid_pinpoints") or [[672, 672]]
        side = int(config["vision_config"]["image_size"])
        patches = side // self.patch_size
        tiles = max(height // side * (width // side) for height, width in sizes)
        rows = max(height // side for height, _ in sizes)
        self.most = (1 + tiles) * patches**2 + rows * patches
        self.most_patches = (1 + tiles) * (patches**2 + 1)

    def encoding(self, images: Tensor, layout: tuple[int, ...]) -> Encoding:
        """`layout`: see `AnyresProcessor`, of a frame `OnevisionVideoProcessor`."""
        if len(layout) == 1:
            return (yield from self._frame(images, ends=bool(layout[0])))
        tiles, rows, columns, *fewer = layout
        found = yield from self.features(images)
        whole, parts = found.split([1, len(images) - 1])
        side = int(whole.shape[1] ** 0.5)
        grid = parts.unflatten(0, (tiles, -1)).unflatten(2, (side, side)).transpose(1, 2).flatten(2, 3).flatten(0, 1)
        top, left = (grid.shape[0] - rows) // 2, (grid.shape[1] - columns) // 2
        kept = grid[top : top + rows, left : left + columns]
        if [rows, columns] != fewer:
            kept = F.interpolate(kept.permute(2, 0, 1)[None], fewer, mode="bilinear")[0].permute(1, 2, 0)
        ended = torch.cat([kept, self.newline.weight.expand(len(kept), 1, -1)], dim=1)
        return torch.cat([whole[0], ended.flatten(0, 1)])

    def _frame(self, images: Tensor, *, ends: bool) -> Encoding:
        """Pool the patches of a frame to half their rows and columns."""
        found = yield from self.features(images)
        side = int(found.shape[1] ** 0.5)
        half = -(-side // 2)
        grid = found.transpose(1, 2).unflatten(2, (side, side))
        pooled = F.interpolate(grid, (half, half), mode="bilinear").flatten(2).transpose(1, 2)[0]
        return torch.cat([pooled, self.newline.weight[None]]) if ends else pooled


def build_tower(config: Mapping[str, Any], processor: Mapping[str, Any], b: Build) -> LlavaNextTower:
    return LlavaNextTower(config, processor, b)
