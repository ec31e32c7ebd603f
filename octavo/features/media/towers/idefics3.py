"""Idefics 3 (https://arxiv.org/abs/2408.12637) and SmolVLM (https://arxiv.org/abs/2504.05299): SigLIP's tower, whose
states are gathered in squares and projected."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from octavo.features.media.towers.layers import Patches, Table, VitLayer, VitSpec, gathered
from octavo.features.media.towers.tower import Encoding, Pixels, Tower, decoder_size
from octavo.models.hf_config import whole
from octavo.nn.build import Build
from octavo.nn.shard import NONE


class Idefics3Tower(Tower):
    names = ((r"(model\.)?vision_model\.", "vision."), (r"(model\.)?connector\.", "connector."))

    def __init__(self, config: Mapping[str, Any], processor: Mapping[str, Any], b: Build) -> None:
        super().__init__()
        vision = config["vision_config"]
        size = whole(vision, "hidden_size", 1152)
        self.dtype = b.dtype
        self.patch_size = whole(vision, "patch_size", 32)
        self.side = whole(vision, "image_size", 224) // self.patch_size
        self.scale = whole(config, "scale_factor", 2)
        if self.side % self.scale:
            raise ValueError(f"scale_factor={self.scale} of {self.side} patches")
        spec = VitSpec.of_siglip(vision, size, heads=16 if config["model_type"] == "idefics3" else 12)
        self._pixels = Pixels(processor, b, standard=True)
        v = b.at("vision")
        embeddings = v.at("embeddings")
        self.patches = Patches(embeddings, "patch_embedding", size, self.patch_size, bias=True)
        self.positions = Table(embeddings, "position_embedding.weight", self.side**2, size)
        self.layers = nn.ModuleList(VitLayer(v.at("encoder", "layers", i), spec) for i in range(spec.layers))
        self.norm = v.layer_norm("post_layernorm", size, spec.eps)
        self.hidden_size = decoder_size(config)
        merged = size * self.scale**2
        projection = b.at("connector", "modality_projection")
        self.projection = projection.linear("proj", inputs=merged, outputs=self.hidden_size, shard=NONE)
        self._order = _bucket_order(self.side).to(b.device)
        self.most, self.most_patches = self.side**2 // self.scale**2, self.side**2
        self.num_layers = len(self.layers)
        self.width = 8 * size + 2 * spec.intermediate_size + self.hidden_size

    def encoding(self, images: Tensor, layout: tuple[int, ...]) -> Encoding:
        x = self.patches(self._pixels(images)) + self.positions.weight[self._order]
        for layer in self.layers:
            x = layer(x)
            yield
        projected: Tensor = self.projection(gathered(self.norm(x), self.side, self.scale))
        return projected.flatten(0, 1)


def _bucket_order(side: int) -> Tensor:
    """Return the position embedding of each patch of a whole tile, [side ** 2].

    A patch's place is its fraction of the tile, sought among multiples of 1 / side. Both are rounded, so a few
    embeddings may be used twice, as when the models were trained.
    """
    edges = torch.arange(1 / side, 1.0, 1 / side)
    places = (torch.arange(side, dtype=torch.float32) * (1.0 / torch.tensor(side))).clamp(max=1.0 - 1e-6)
    buckets = torch.bucketize(places, edges, right=True)
    return (buckets[:, None] * side + buckets).flatten()


def build_tower(config: Mapping[str, Any], processor: Mapping[str, Any], b: Build) -> Idefics3Tower:
    return Idefics3Tower(config, processor, b)
