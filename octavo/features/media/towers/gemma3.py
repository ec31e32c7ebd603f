"""Gemma 3 (https://arxiv.org/abs/2503.19786): SigLIP's tower, whose last states are averaged over squares of patches,
normalized and projected."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from octavo.features.media.towers.layers import Patches, Table, VitLayer, VitSpec
from octavo.features.media.towers.tower import Encoding, Pixels, Tower, decoder_size
from octavo.models.hf_config import whole
from octavo.models.norms import make_norm
from octavo.models.spec import NormSpec
from octavo.nn.build import Build


class Gemma3Tower(Tower):
    names = (
        (r"(model\.)?vision_tower\.(vision_model\.)?", "vision."),
        (r"(model\.)?multi_modal_projector\.", "projector."),
    )
    unneeded = ("vision.head.",)

    def __init__(self, config: Mapping[str, Any], processor: Mapping[str, Any], b: Build) -> None:
        super().__init__()
        vision = config["vision_config"]
        size = whole(vision, "hidden_size", 768)
        self.dtype = b.dtype
        self.patch_size = whole(vision, "patch_size", 16)
        self.side = whole(vision, "image_size", 224) // self.patch_size
        self.most, self.most_patches = whole(config, "mm_tokens_per_image", 256), self.side**2
        self.pooled = self.side // math.isqrt(self.most)
        spec = VitSpec.of_siglip(vision, size)
        self._pixels = Pixels(processor, b, standard=True)
        v = b.at("vision")
        embeddings = v.at("embeddings")
        self.patches = Patches(embeddings, "patch_embedding", size, self.patch_size, bias=True)
        self.positions = Table(embeddings, "position_embedding.weight", self.side**2, size)
        self.layers = nn.ModuleList(VitLayer(v.at("encoder", "layers", i), spec) for i in range(spec.layers))
        self.norm = v.layer_norm("post_layernorm", size, spec.eps)
        self.hidden_size = decoder_size(config)
        projector = b.at("projector")
        self.embedding_norm = make_norm(projector, "mm_soft_emb_norm", size, NormSpec(spec.eps, offset=1.0))
        self.projection = Table(projector, "mm_input_projection_weight", size, self.hidden_size)
        self.num_layers = len(self.layers)
        self.width = 8 * size + 2 * spec.intermediate_size

    def encoding(self, images: Tensor, layout: tuple[int, ...]) -> Encoding:
        x = self.patches(self._pixels(images)) + self.positions.weight
        for layer in self.layers:
            x = layer(x)
            yield
        rows = self.norm(x).transpose(1, 2).unflatten(2, (self.side, self.side))
        pooled = F.avg_pool2d(rows, self.pooled).flatten(2).transpose(1, 2).flatten(0, 1)
        projected: Tensor = self.embedding_norm(pooled.contiguous()) @ self.projection.weight
        return projected


def build_tower(config: Mapping[str, Any], processor: Mapping[str, Any], b: Build) -> Gemma3Tower:
    return Gemma3Tower(config, processor, b)
