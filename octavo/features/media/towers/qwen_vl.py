"""Qwen2-VL (https://arxiv.org/abs/2409.12191) and Qwen2.5-VL (https://arxiv.org/abs/2502.13923): patches in rows and
columns, rotary positions along both, four neighbours merged into one embedding. The latter attends within windows in
most layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from octavo.device.transfer import upload
from octavo.features.media.towers.layers import Activation, Table, activation
from octavo.features.media.towers.tower import Encoding, Pixels, Tower
from octavo.models.hf_config import value_or, whole
from octavo.nn.attention.whole import LengthGroup, attend_whole, groups_of
from octavo.nn.build import Build
from octavo.nn.ops.rope import apply_rope_joint
from octavo.nn.shard import NONE

_EPS = 1e-6
_THETA = 10000.0


@dataclass(frozen=True, slots=True)
class Form:
    """What differs between the families.

    Attributes:
        up, down: names of the feed-forward's products.
        gated: the feed-forwards have a gate, and the norms are RMSNorms.
        whole_layers: layers that attend within the whole image; None for all.
        window: merged patches along the edge of a window.
    """

    hidden_size: int
    heads: int
    inner: int
    activation: Activation
    up: tuple[str, ...]
    down: str
    gated: bool = False
    whole_layers: frozenset[int] | None = None
    window: int = 0

    def norm(self, b: Build, name: str) -> nn.Module:
        make = b.norm if self.gated else b.layer_norm
        return make(name, self.hidden_size, _EPS)


@dataclass(frozen=True, slots=True)
class Places:
    """Where the patches of an image are: their angles, and which of them attend to each other."""

    table: Tensor
    rows: Tensor
    everyone: Sequence[LengthGroup]
    windows: Sequence[LengthGroup]


class Block(nn.Module):
    if TYPE_CHECKING:

        def __call__(self, x: Tensor, places: Places, /) -> Tensor: ...

    def __init__(self, b: Build, form: Form, *, windows: bool) -> None:
        super().__init__()
        size = form.hidden_size
        self.form, self.windows = form, windows
        self.norm1, self.norm2 = form.norm(b, "norm1"), form.norm(b, "norm2")
        attention, mlp = b.at("attn"), b.at("mlp")
        self.qkv = attention.linear("qkv", inputs=size, outputs=3 * size, shard=NONE, bias=True)
        self.out = attention.linear("proj", inputs=size, outputs=size, shard=NONE, bias=True)
        self.up = mlp.linear(*form.up, inputs=size, outputs=form.inner, shard=NONE, bias=True)
        self.down = mlp.linear(form.down, inputs=form.inner, outputs=size, shard=NONE, bias=True)

    def forward(self, x: Tensor, places: Places) -> Tensor:
        """[T, hidden_size] to the same."""
        heads = self.qkv(self.norm1(x)).unflatten(-1, (3 * self.form.heads, -1))
        apply_rope_joint(heads[:, : 2 * self.form.heads], places.table, places.rows)
        q, k, v = heads.split(self.form.heads, dim=1)
        x = x + self.out(attend_whole(q, k, v, places.windows if self.windows else places.everyone).flatten(1))
        inner = self.up(self.norm2(x))
        if not self.form.gated:
            return x + self.down(self.form.activation(inner))
        gate, value = inner.chunk(2, dim=-1)
        return x + self.down(self.form.activation(gate) * value)


class PatchTower(Tower):
    """A tower of such patches.

    Attributes:
        merge: patches along the edge of a square that becomes one embedding.
        frames: in a patch of a video; of an image they are the same.
        kernel: of the patches' embedding.
        bias: of that; None for none.
    """

    names = ((r"(model\.)?visual\.", "visual."),)
    merge: int
    frames: int
    head_dim: int
    kernel: Table
    bias: Table | None

    def patches(self, pixels: Tensor, grid: tuple[int, int]) -> Tensor:
        """Embed the patches, those that are merged after each other: [n, 3, height, width] to [T, hidden_size].

        Args:
            pixels: an image, or the frames of whole groups, whose patches follow each other.
        """
        rows, columns = grid
        edge, patch = self.merge, self.patch_size
        shape = (3, rows, edge, patch, columns, edge, patch)
        if len(pixels) == 1:
            parts = pixels[0].reshape(shape).permute(1, 4, 2, 5, 0, 3, 6).flatten(0, 3)
            frames = parts.unsqueeze(2).expand(-1, -1, self.frames, -1, -1)
        else:
            parts = pixels.reshape(-1, self.frames, *shape).permute(0, 3, 6, 4, 7, 2, 1, 5, 8)
            frames = parts.flatten(0, 4)
        bias = None if self.bias is None else self.bias.weight
        return F.linear(frames.flatten(1), self.kernel.weight.flatten(1), bias)

    def groups(self, images: Tensor) -> int:
        """Return how many groups of frames there are; an image is one."""
        return max(1, len(images) // self.frames)

    def axes(self, order: np.ndarray, columns: int) -> np.ndarray:
        """Return the row and the column of each patch, [T, 2], with the merged ones in this order."""
        inner = np.arange(self.merge**2)
        down = (order // columns * self.merge)[:, None] + inner // self.merge
        across = (order % columns * self.merge)[:, None] + inner % self.merge
        return np.stack([down.ravel(), across.ravel()], axis=1)

    def places(self, axes: np.ndarray, windows: Sequence[int], groups: int = 1) -> Places:
        """Return where patches are, from their rows and columns.

        Args:
            windows: merged patches of each window, in their order.
            groups: how often both are repeated; patches attend within their group.
        """
        device, each = self.kernel.weight.device, self.merge**2
        quarter = self.head_dim // 4
        frequencies = 1.0 / (_THETA ** (torch.arange(0, 2 * quarter, 2, dtype=torch.float) / (2 * quarter)))
        angles = (torch.from_numpy(axes).float()[:, :, None] * frequencies).flatten(1).repeat(groups, 1)
        return Places(
            torch.cat([angles.cos(), angles.sin()], dim=1).to(device),
            torch.arange(groups * len(axes), device=device),
            groups_of([len(axes)] * groups, device),
            groups_of([window * each for window in windows] * groups, device),
        )


class QwenTower(PatchTower):
    def __init__(self, config: Mapping[str, Any], processor: Mapping[str, Any], b: Build) -> None:
        super().__init__()
        vision = config["vision_config"]
        gated = config["architectures"][0].startswith("Qwen2_5")
        size = whole(vision, "hidden_size" if gated else "embed_dim", 1280)
        self.dtype = b.dtype
        self.patch_size = whole(vision, "patch_size", 14)
        self.merge = whole(vision, "spatial_merge_size", 2)
        self.frames = whole(vision, "temporal_patch_size", 2)
        depth = whole(vision, "depth", 32)
        self._form = Form(
            size,
            whole(vision, "num_heads", 16),
            whole(vision, "intermediate_size", 3420) if gated else int(size * value_or(vision, "mlp_ratio", 4)),
            activation(vision, "hidden_act", "silu" if gated else "quick_gelu"),
            ("gate_proj", "up_proj") if gated else ("fc1",),
            "down_proj" if gated else "fc2",
            gated,
            frozenset(value_or(vision, "fullatt_block_indexes", [7, 15, 23, 31])) if gated else None,
            whole(vision, "window_size", 112) // self.merge // self.patch_size if gated else 0,
        )
        self._pixels = Pixels(processor, b, standard=False)
        v = b.at("visual")
        self.head_dim = size // self._form.heads
        self.kernel = Table(v, "patch_embed.proj.weight", size, 3, self.frames, self.patch_size, self.patch_size)
        self.bias = None
        self.blocks = nn.ModuleList(
            Block(
                v.at("blocks", i),
                self._form,
                windows=self._form.whole_layers is not None and i not in self._form.whole_layers,
            )
            for i in range(depth)
        )
        merger = v.at("merger")
        self.norm = self._form.norm(merger, "ln_q")
        merged = size * self.merge**2
        self.hidden_size = whole(vision, "out_hidden_size" if gated else "hidden_size", 3584)
        self.first = merger.at("mlp").linear("0", inputs=merged, outputs=merged, shard=NONE, bias=True)
        self.second = merger.at("mlp").linear("2", inputs=merged, outputs=self.hidden_size, shard=NONE, bias=True)
        self.most = largest(processor, self.patch_size * self.merge)
        self.most_patches = self.most * self.merge**2
        self.num_layers = len(self.blocks)
        self.width = 8 * size + 3 * self._form.inner

    def encoding(self, images: Tensor, layout: tuple[int, ...]) -> Encoding:
        """Compute in the order of windows: patches of a window, and the four that are merged, follow each other."""
        rows, columns = layout
        order, windows = self._order(rows, columns)
        count = self.groups(images)
        places = self.places(self.axes(order, columns), windows, count)
        device = images.device
        starts = np.arange(count)[:, None] * len(order)
        groups = upload((starts + order).ravel(), device)
        x = self.patches(self._pixels(images), (rows, columns))
        x = x.unflatten(0, (-1, self.merge**2))[groups].flatten(0, 1)
        for block in self.blocks:
            x = block(x, places)
            yield
        merged = self.second(F.gelu(self.first(self.norm(x).unflatten(0, (-1, self.merge**2)).flatten(1))))
        found = torch.empty_like(merged)
        found[groups] = merged
        return found

    def _order(self, rows: int, columns: int) -> tuple[np.ndarray, list[int]]:
        """Return the merged patches in the order of windows, and how many each window has."""
        numbers = np.arange(rows * columns).reshape(rows, columns)
        edge = self._form.window or max(rows, columns)
        windows = [
            numbers[top : top + edge, left : left + edge].ravel()
            for top in range(0, rows, edge)
            for left in range(0, columns, edge)
        ]
        return np.concatenate(windows), [len(window) for window in windows]


def largest(processor: Mapping[str, Any], edge: int) -> int:
    """Return the most embeddings of an image, each of a square of pixels with this edge."""
    size = processor.get("size") or {}
    pixels = int(processor.get("max_pixels") or size.get("max_pixels") or size.get("longest_edge") or 28 * 28 * 1280)
    return max(pixels, int(processor.get("min_pixels") or 0)) // edge**2 + 1


def build_tower(config: Mapping[str, Any], processor: Mapping[str, Any], b: Build) -> QwenTower:
    return QwenTower(config, processor, b)
