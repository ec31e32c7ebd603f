"""Pixtral (https://arxiv.org/abs/2410.07073) and Mistral Small 3.1: patches in rows and columns with rotary positions
along both; two linear layers, before which the latter merges neighbours."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from octavo.features.media.processors.base import edge, edges
from octavo.features.media.towers.layers import Activation, Patches, Perceptron, activation
from octavo.features.media.towers.tower import Encoding, Pixels, Tower, decoder_size
from octavo.models.hf_config import value_or, whole
from octavo.nn.build import Build
from octavo.nn.ops.rope import apply_rope_joint
from octavo.nn.shard import NONE

_EPS = 1e-5


class _Layer(nn.Module):
    if TYPE_CHECKING:

        def __call__(self, x: Tensor, table: Tensor, rows: Tensor, /) -> Tensor: ...

    def __init__(self, b: Build, size: int, inner: int, heads: int, act: Activation) -> None:
        super().__init__()
        self.heads, self.activation = heads, act
        self.attention_norm, self.mlp_norm = b.norm("attention_norm", size, _EPS), b.norm("ffn_norm", size, _EPS)
        attention, mlp = b.at("attention"), b.at("feed_forward")
        self.qkv = attention.linear("q_proj", "k_proj", "v_proj", inputs=size, outputs=size, shard=NONE)
        self.out = attention.linear("o_proj", inputs=size, outputs=size, shard=NONE)
        self.up = mlp.linear("gate_proj", "up_proj", inputs=size, outputs=inner, shard=NONE)
        self.down = mlp.linear("down_proj", inputs=inner, outputs=size, shard=NONE)

    def forward(self, x: Tensor, table: Tensor, rows: Tensor) -> Tensor:
        """[T, size] to the same."""
        heads = self.qkv(self.attention_norm(x)).unflatten(-1, (3 * self.heads, -1))
        apply_rope_joint(heads[:, : 2 * self.heads], table, rows)
        q, k, v = (part.transpose(0, 1)[None] for part in heads.split(self.heads, dim=1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v)[0].transpose(0, 1).flatten(1))
        gate, value = self.up(self.mlp_norm(x)).chunk(2, dim=-1)
        return x + self.down(self.activation(gate) * value)


class PixtralTower(Tower):
    names = ((r"(model\.)?vision_tower\.", "vision."), (r"(model\.)?multi_modal_projector\.", "projector."))
    unneeded = ("vision.transformer.layers.",)

    def __init__(self, config: Mapping[str, Any], processor: Mapping[str, Any], b: Build) -> None:
        super().__init__()
        vision, text = config["vision_config"], config["text_config"]
        size, depth = whole(vision, "hidden_size", 1024), whole(vision, "num_hidden_layers", 24)
        inner, heads = whole(vision, "intermediate_size", 4096), whole(vision, "num_attention_heads", 16)
        self.dtype = b.dtype
        self.patch_size = edge(vision, "patch_size", 16)
        self.merge = whole(config, "spatial_merge_size", 2) if "spatial_merge_size" in config else 0
        place = int(value_or(config, "vision_feature_layer", -1))
        used = place + depth + 1 if place < 0 else place
        if not 0 <= used <= depth:
            raise ValueError(f"vision_feature_layer={place} of {depth}")
        if not self.merge and value_or(config, "vision_feature_select_strategy", "full") != "full":
            raise ValueError("vision_feature_select_strategy is not 'full'")
        self._pixels = Pixels(processor, b, standard=False)
        rope = value_or(vision, "rope_parameters", {})
        theta = float(rope.get("rope_theta") or value_or(vision, "rope_theta", 10000.0))
        width = size // heads
        frequencies = 1.0 / (theta ** (torch.arange(0, width, 2, dtype=torch.float) / width))
        self._frequencies = torch.stack([frequencies[0::2], frequencies[1::2]]).to(b.device)
        v = b.at("vision")
        self.patches = Patches(v, "patch_conv", size, self.patch_size, bias=False)
        self.norm = v.norm("ln_pre", size, _EPS)
        act = activation(vision, "hidden_act", "silu")
        layers = v.at("transformer", "layers")
        self.layers = nn.ModuleList(_Layer(layers.at(i), size, inner, heads, act) for i in range(used))
        self.hidden_size = decoder_size(config)
        projector = b.at("projector")
        self.before = self.merging = None
        if self.merge:
            self.before = projector.norm("norm", size, float(value_or(text, "rms_norm_eps", 1e-6)))
            merged = size * self.merge**2
            place_of = projector.at("patch_merger")
            self.merging = place_of.linear("merging_layer", inputs=merged, outputs=size, shard=NONE)
        sizes = (size, self.hidden_size, self.hidden_size)
        act = activation(config, "projector_hidden_act", "gelu")
        bias = bool(value_or(config, "multimodal_projector_bias", not self.merge))
        self.projector = Perceptron(projector, ("linear_1", "linear_2"), sizes, act, bias=bias)
        limits = edges(processor.get("size") or {"longest_edge": 1024}, "size")
        pixels = self.patch_size * max(1, self.merge)
        high, wide = (-(-limits.get(name, limits.get("longest_edge", 0)) // pixels) for name in ("height", "width"))
        self.most = high * wide
        self.most_patches = self.most * max(1, self.merge) ** 2
        self.num_layers = len(self.layers)
        self.width = 8 * size + 3 * inner

    def encoding(self, images: Tensor, layout: tuple[int, ...]) -> Encoding:
        rows, columns = images.shape[1] // self.patch_size, images.shape[2] // self.patch_size
        x = self.norm(self.patches(self._pixels(images))[0])
        table = self._table(rows, columns)
        places = torch.arange(len(x), device=x.device)
        for layer in self.layers:
            x = layer(x, table, places)
            yield
        if self.before is not None and self.merging is not None:
            x = self.merging(self._merged(self.before(x), rows, columns))
        return self.projector(x)

    def _table(self, rows: int, columns: int) -> Tensor:
        """Return cosines and sines of each patch: the angles of its row, then those of its column."""
        down, along = self._frequencies
        counts = torch.arange(max(rows, columns), device=down.device, dtype=torch.float)
        high = (counts[:rows, None] * down)[:, None].expand(-1, columns, -1)
        wide = (counts[:columns, None] * along)[None].expand(rows, -1, -1)
        angles = torch.cat([high, wide], dim=-1).flatten(0, 1)
        return torch.cat([angles.cos(), angles.sin()], dim=-1)

    def _merged(self, x: Tensor, rows: int, columns: int) -> Tensor:
        """Concatenate the states of each square of patches, channel by channel: [T, size] to [T / merge ** 2, ...]."""
        squares = x.unflatten(0, (rows // self.merge, self.merge, columns // self.merge, self.merge))
        made: Tensor = squares.permute(0, 2, 4, 1, 3).flatten(2).flatten(0, 1)
        return made


def build_tower(config: Mapping[str, Any], processor: Mapping[str, Any], b: Build) -> PixtralTower:
    return PixtralTower(config, processor, b)
