"""Qwen3-VL (https://arxiv.org/abs/2511.21631) and Qwen3.5: patches in rows and columns with learned and rotary
positions; embeddings for the decoder's input and, in Qwen3-VL, for its first layers (DeepStack,
https://arxiv.org/abs/2406.04334)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from octavo.core.errors import ConfigError
from octavo.features.media.towers.layers import Table, activation
from octavo.features.media.towers.qwen_vl import Block, Form, PatchTower, largest
from octavo.features.media.towers.tower import Encoding, Pixels
from octavo.models.hf_config import only, value_or, whole
from octavo.nn.build import Build
from octavo.nn.shard import NONE

_EPS = 1e-6
_THETA = 10000.0
_DEEPSTACK = (8, 16, 24)


class _Merger(nn.Module):
    """Makes one embedding of the states of merged patches, which are normed one by one, or together."""

    if TYPE_CHECKING:

        def __call__(self, x: Tensor, /) -> Tensor: ...

    def __init__(self, b: Build, size: int, merged: int, output: int, *, together: bool) -> None:
        super().__init__()
        self.merged, self.together = merged, together
        self.norm = b.layer_norm("norm", merged if together else size, _EPS)
        self.first = b.linear("linear_fc1", inputs=merged, outputs=merged, shard=NONE, bias=True)
        self.second = b.linear("linear_fc2", inputs=merged, outputs=output, shard=NONE, bias=True)

    def forward(self, x: Tensor) -> Tensor:
        """[T, size] to [T * size / merged, output]."""
        joined = x.view(-1, self.merged)
        return self.second(F.gelu(self.first(self.norm(joined) if self.together else self.norm(x).view_as(joined))))


class Qwen3Tower(PatchTower):
    def __init__(self, config: Mapping[str, Any], processor: Mapping[str, Any], b: Build) -> None:
        super().__init__()
        vision = config["vision_config"]
        only(vision, "in_channels", 3)
        rope = value_or(vision, "rope_parameters", {})
        only(rope, "rope_type", "axial")
        only(rope, "rope_theta", _THETA)
        size = whole(vision, "hidden_size", 1152)
        self.dtype = b.dtype
        self.patch_size = whole(vision, "patch_size", 16)
        self.merge = whole(vision, "spatial_merge_size", 2)
        self.frames = whole(vision, "temporal_patch_size", 2)
        act = activation(vision, "hidden_act", "gelu_pytorch_tanh")
        heads, inner = whole(vision, "num_heads", 16), whole(vision, "intermediate_size", 4304)
        form = Form(size, heads, inner, act, up=("linear_fc1",), down="linear_fc2")
        self.head_dim = size // heads
        self._pixels = Pixels(processor, b, standard=False)
        v = b.at("visual")
        shape = 3, self.frames, self.patch_size, self.patch_size
        self.kernel = Table(v, "patch_embed.proj.weight", size, *shape)
        self.bias = Table(v, "patch_embed.proj.bias", size)
        count = whole(vision, "num_position_embeddings", 2304)
        self._side = int(count**0.5)
        self.positions = Table(v, "pos_embed.weight", count, size)
        depth = whole(vision, "depth", 27)
        self.blocks = nn.ModuleList(Block(v.at("blocks", i), form, windows=False) for i in range(depth))
        merged = size * self.merge**2
        self.hidden_size = whole(vision, "out_hidden_size", 3584)
        self.merger = _Merger(v.at("merger"), size, merged, self.hidden_size, together=False)
        self._stacked = self._deepstack(config, depth)
        self.mergers = nn.ModuleList(
            _Merger(v.at("deepstack_merger_list", i), size, merged, self.hidden_size, together=True)
            for i in range(len(self._stacked))
        )
        self.additions = len(self._stacked)
        self.most = largest(processor, self.patch_size * self.merge)
        self.most_patches = self.most * self.merge**2
        self.num_layers = len(self.blocks)
        self.width = 8 * size + 3 * inner

    def _deepstack(self, config: Mapping[str, Any], depth: int) -> tuple[int, ...]:
        """Return the layers whose states the decoder adds, in its first layers."""
        vision = config["vision_config"]
        if config["architectures"][0].startswith("Qwen3_5"):
            only(vision, "deepstack_visual_indexes", [])
            return ()
        stated = tuple(value_or(vision, "deepstack_visual_indexes", _DEEPSTACK))
        if stated != tuple(sorted(set(stated))) or any(layer not in range(depth) for layer in stated):
            raise ConfigError(
                f"The model's vision_config has deepstack_visual_indexes={list(stated)}; they should be "
                f"ascending numbers of its {depth} layers."
            )
        return stated

    def encoding(self, images: Tensor, layout: tuple[int, ...]) -> Encoding:
        rows, columns = layout
        axes = self.axes(np.arange(rows * columns), columns)
        groups = self.groups(images)
        places = self.places(axes, [], groups)
        x = self.patches(self._pixels(images), (rows, columns))
        x = x + self._learned(axes, rows * self.merge, columns * self.merge).repeat(groups, 1)
        found: list[Tensor] = []
        for i, block in enumerate(self.blocks):
            x = block(x, places)
            if i in self._stacked:
                found.append(self.mergers[len(found)](x))
            yield
        return torch.cat([self.merger(x), *found], dim=1)

    def _learned(self, axes: np.ndarray, rows: int, columns: int) -> Tensor:
        """Return the position embeddings of patches, [T, hidden_size]: those of a square, interpolated linearly to the
        image's rows and columns, with the same corners."""
        weight, side = self.positions.weight, self._side
        scales = np.asarray([(side - 1) / max(count - 1, 1) for count in (rows, columns)], dtype=np.float32)
        at = axes.astype(np.float32) * scales
        low = np.minimum(at.astype(np.int64), side - 1)
        high = np.minimum(low + 1, side - 1)
        above = at - low
        total = torch.zeros(len(axes), weight.shape[1], device=weight.device)
        for down, of_row in ((low[:, 0], 1 - above[:, 0]), (high[:, 0], above[:, 0])):
            for across, of_column in ((low[:, 1], 1 - above[:, 1]), (high[:, 1], above[:, 1])):
                index = torch.from_numpy(down * side + across).to(weight.device)
                share = torch.from_numpy(of_row * of_column).to(weight.device)
                total += weight.index_select(0, index).float() * share[:, None]
        return total.to(weight.dtype)


def build_tower(config: Mapping[str, Any], processor: Mapping[str, Any], b: Build) -> Qwen3Tower:
    return Qwen3Tower(config, processor, b)
