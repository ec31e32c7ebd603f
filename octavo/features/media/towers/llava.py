"""LLaVA 1.5 (https://arxiv.org/abs/2310.03744): states of an inner layer of CLIP's (https://arxiv.org/abs/2103.00020)
or SigLIP's (https://arxiv.org/abs/2303.15343) tower, through two linear layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from octavo.features.media.towers.layers import Patches, Perceptron, Table, VitLayer, VitSpec, activation
from octavo.features.media.towers.tower import Encoding, Pixels, Tower, decoder_size
from octavo.models.hf_config import value_or, whole
from octavo.nn.build import Build


class LlavaTower(Tower):
    """Names in the module are those after `names`."""

    names: tuple[tuple[str, str], ...] = (
        (r"(model\.)?vision_tower\.(vision_model\.)?", "vision."),
        (r"(model\.)?multi_modal_projector\.", "projector."),
    )
    unneeded = ("vision.encoder.layers.", "vision.post_layernorm.", "vision.head.")

    def __init__(self, config: Mapping[str, Any], processor: Mapping[str, Any], b: Build) -> None:
        super().__init__()
        vision = config["vision_config"]
        clip = vision.get("model_type", "clip_vision_model") == "clip_vision_model"
        size, depth = whole(vision, "hidden_size", 768), whole(vision, "num_hidden_layers", 12)
        self.dtype = b.dtype
        self.patch_size = whole(vision, "patch_size", 32 if clip else 16)
        side = whole(vision, "image_size", 224) // self.patch_size
        stated = config.get("vision_feature_layer", -2)
        places = stated if isinstance(stated, list) else [stated]
        self._places = [place + depth + 1 if place < 0 else place for place in places]
        if not all(0 <= place <= depth for place in self._places):
            raise ValueError(f"vision_feature_layer={stated} of {depth} layers")
        self._skips = value_or(config, "vision_feature_select_strategy", "default") == "default"
        self._pixels = Pixels(processor, b, standard=not clip)
        spec = VitSpec(
            size,
            whole(vision, "intermediate_size", 3072),
            whole(vision, "num_attention_heads", 12),
            max(self._places),
            float(value_or(vision, "layer_norm_eps", 1e-5 if clip else 1e-6)),
            activation(vision, "hidden_act", "quick_gelu" if clip else "gelu_pytorch_tanh"),
        )
        v = b.at("vision")
        embeddings = v.at("embeddings")
        self.patches = Patches(embeddings, "patch_embedding", size, self.patch_size, bias=not clip)
        self.summary = Table(embeddings, "class_embedding", size) if clip else None
        self.positions = Table(embeddings, "position_embedding.weight", side**2 + clip, size)
        self.norm = v.layer_norm("pre_layrnorm", size, spec.eps) if clip else None
        self.layers = nn.ModuleList(VitLayer(v.at("encoder", "layers", i), spec) for i in range(spec.layers))
        self.hidden_size = decoder_size(config)
        self.projector = Perceptron(
            b.at("projector"),
            ("linear_1", "linear_2"),
            (size * len(places), self.hidden_size, self.hidden_size),
            activation(config, "projector_hidden_act", "gelu"),
            bias=bool(value_or(config, "multimodal_projector_bias", True)),
        )
        self.most = self.most_patches = side**2 + 1
        self.num_layers = len(self.layers)
        self.width = 8 * size + 2 * spec.intermediate_size + 2 * self.hidden_size

    def encoding(self, images: Tensor, layout: tuple[int, ...]) -> Encoding:
        found = yield from self.features(images)
        return found.flatten(0, 1)

    def features(self, images: Tensor) -> Encoding:
        """Return the embeddings of each picture, [n, patches, hidden_size]."""
        x = self.patches(self._pixels(images))
        if self.summary is not None:
            x = torch.cat([self.summary.weight.expand(len(x), 1, -1), x], dim=1)
        x = x + self.positions.weight
        if self.norm is not None:
            x = self.norm(x)
        states = {0: x}
        for number, layer in enumerate(self.layers, start=1):
            x = layer(x)
            yield
            if number in self._places:
                states[number] = x
        chosen = torch.cat([states[place] for place in self._places], dim=-1)
        return self.projector(chosen[:, 1:] if self._skips else chosen)


def build_tower(config: Mapping[str, Any], processor: Mapping[str, Any], b: Build) -> LlavaTower:
    return LlavaTower(config, processor, b)
