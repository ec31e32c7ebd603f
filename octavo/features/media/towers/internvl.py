"""InternVL (https://arxiv.org/abs/2312.14238): InternViT, whose states are gathered in squares, and two linear layers.

A layer of InternViT is that of other towers with a scale for each channel of what it adds, and in the large one norms
of queries and keys over all heads.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from octavo.features.media.processors.base import edge
from octavo.features.media.towers.layers import Patches, Perceptron, Table, activation, gathered
from octavo.features.media.towers.tower import Encoding, Pixels, Tower, decoder_size
from octavo.models.hf_config import value_or, whole
from octavo.nn.build import Build
from octavo.nn.shard import NONE

_EPS, _PROJECTOR_EPS = 1e-6, 1e-5


class _Layer(nn.Module):
    if TYPE_CHECKING:

        def __call__(self, x: Tensor, /) -> Tensor: ...

    def __init__(self, b: Build, vision: Mapping[str, Any]) -> None:
        super().__init__()
        size = whole(vision, "hidden_size", 1024)
        inner = whole(vision, "intermediate_size", 4096)
        self.heads = whole(vision, "num_attention_heads", 16)
        self.activation = activation(vision, "hidden_act", "gelu")
        eps = float(value_or(vision, "layer_norm_eps", _EPS))
        norm = b.norm if value_or(vision, "norm_type", "layer_norm") == "rms_norm" else b.layer_norm
        self.before_attention, self.before_mlp = norm("layernorm_before", size, eps), norm("layernorm_after", size, eps)
        attention, mlp = b.at("attention"), b.at("mlp")
        names, bias = ("q_proj", "k_proj", "v_proj"), bool(value_or(vision, "attention_bias", False))
        self.qkv = attention.linear(*names, inputs=size, outputs=size, shard=NONE, bias=bias)
        normed = bool(value_or(vision, "use_qk_norm", False))
        self.q_norm = attention.norm("q_norm", size, _EPS) if normed else None
        self.k_norm = attention.norm("k_norm", size, _EPS) if normed else None
        self.out = attention.linear("projection_layer", inputs=size, outputs=size, shard=NONE, bias=True)
        self.up = mlp.linear("fc1", inputs=size, outputs=inner, shard=NONE, bias=True)
        self.down = mlp.linear("fc2", inputs=inner, outputs=size, shard=NONE, bias=True)
        self.first, self.second = Table(b, "lambda_1", size), Table(b, "lambda_2", size)

    def forward(self, x: Tensor) -> Tensor:
        """[n, tokens, hidden_size] to the same."""
        q, k, v = self.qkv.split(self.qkv(self.before_attention(x)))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (q, k, v))
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = x + self.first.weight * self.out(mixed)
        return x + self.second.weight * self.down(self.activation(self.up(self.before_mlp(x))))


class InternTower(Tower):
    names = ((r"(model\.)?vision_tower\.", "vision."), (r"(model\.)?multi_modal_projector\.", "projector."))
    unneeded = ("vision.embeddings.mask_token", "vision.encoder.layer.", "vision.layernorm.")

    def __init__(self, config: Mapping[str, Any], processor: Mapping[str, Any], b: Build) -> None:
        super().__init__()
        vision = config["vision_config"]
        size, depth = whole(vision, "hidden_size", 1024), whole(vision, "num_hidden_layers", 24)
        self.dtype = b.dtype
        self.patch_size = edge(vision, "patch_size", 14)
        self.side = edge(vision, "image_size", 448) // self.patch_size
        self.scale = round(1 / float(value_or(config, "downsample_ratio", 0.5)))
        place = int(value_or(config, "vision_feature_layer", -1))
        used = place + depth + 1 if place < 0 else place
        if self.side % self.scale or not 0 <= used <= depth:
            raise ValueError(f"downsample_ratio of {self.side} patches, vision_feature_layer={place} of {depth}")
        self._skips = value_or(config, "vision_feature_select_strategy", "default") == "default"
        if not self._skips:
            raise ValueError("vision_feature_select_strategy is not 'default'")
        self._pixels = Pixels(processor, b, standard=False)
        v = b.at("vision")
        embeddings = v.at("embeddings")
        self.patches = Patches(embeddings, "patch_embeddings.projection", size, self.patch_size, bias=True)
        self.summary = Table(embeddings, "cls_token", 1, 1, size)
        placed = bool(value_or(vision, "use_absolute_position_embeddings", True))
        self.positions = Table(embeddings, "position_embeddings", 1, self.side**2 + 1, size) if placed else None
        self.layers = nn.ModuleList(_Layer(v.at("encoder", "layer", i), vision) for i in range(used))
        pools = bool(value_or(vision, "use_mean_pooling", True))
        eps = float(value_or(vision, "layer_norm_eps", _EPS))
        self.norm = None if pools or place != -1 else v.layer_norm("layernorm", size, eps)
        self.hidden_size = decoder_size(config)
        merged = size * self.scale**2
        projector = b.at("projector")
        self.before = projector.layer_norm("layer_norm", merged, _PROJECTOR_EPS)
        sizes = (merged, self.hidden_size, self.hidden_size)
        act = activation(config, "projector_hidden_act", "gelu")
        self.projector = Perceptron(projector, ("linear_1", "linear_2"), sizes, act, bias=True)
        self.most, self.most_patches = self.side**2 // self.scale**2, self.side**2 + 1
        self.num_layers = len(self.layers)
        self.width = 8 * size + 2 * whole(vision, "intermediate_size", 4096) + 2 * self.hidden_size

    def encoding(self, images: Tensor, layout: tuple[int, ...]) -> Encoding:
        x = self.patches(self._pixels(images))
        x = torch.cat([self.summary.weight.expand(len(x), 1, -1), x], dim=1)
        if self.positions is not None:
            x = x + self.positions.weight
        for layer in self.layers:
            x = layer(x)
            yield
        if self.norm is not None:
            x = self.norm(x)
        return self.projector(self.before(gathered(x[:, 1:], self.side, self.scale))).flatten(0, 1)


def build_tower(config: Mapping[str, Any], processor: Mapping[str, Any], b: Build) -> InternTower:
    return InternTower(config, processor, b)
