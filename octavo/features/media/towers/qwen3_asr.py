"""Qwen3-ASR (https://arxiv.org/abs/2601.21337): convolutions over chunks of a second, and a transformer that attends
within windows of some of them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from octavo.features.media.processors.speech import CHUNK, convolved
from octavo.features.media.towers.layers import Perceptron
from octavo.features.media.towers.tower import Encoding, decoder_size
from octavo.features.media.towers.whisper import Convolution, SpeechLayer, SpeechSpec, SpeechTower
from octavo.models.hf_config import whole
from octavo.nn.build import Build
from octavo.nn.shard import NONE

_EPS = 1e-5
_LONGEST_PERIOD = 10_000.0


class QwenAsrTower(SpeechTower):
    """An item is one window."""

    names = (
        (r"thinker\.audio_tower\.proj", "projector.linear_"),
        (r"(model\.|thinker\.)?audio_tower\.", "audio."),
        (r"(model\.)?multi_modal_projector\.", "projector."),
    )

    def __init__(self, config: Mapping[str, Any], processor: Mapping[str, Any], b: Build) -> None:
        super().__init__()
        audio = config["audio_config"]
        spec = SpeechSpec.of(audio, (1024, 4096, 16, 24), key_bias=True)
        size, bins = spec.hidden_size, whole(audio, "num_mel_bins", 128)
        inner = whole(audio, "downsample_hidden_size", 480)
        self.dtype = b.dtype
        self._numbers = 8 * bins
        a = b.at("audio")
        sizes = (1, inner, inner)
        self.convolutions = nn.ModuleList(
            Convolution(a, f"conv2d{number}", inputs, inner, stride=2, axes=2)
            for number, inputs in enumerate(sizes, start=1)
        )
        rows = ((bins + 1) // 2 + 1) // 2
        self.out = a.linear("conv_out", inputs=inner * ((rows + 1) // 2), outputs=size, shard=NONE)
        self.positions = _sinusoids(convolved(CHUNK), size).to(b.device, b.dtype)
        self.layers = nn.ModuleList(SpeechLayer(a.at("layers", i), spec) for i in range(spec.layers))
        self.norm = a.layer_norm("ln_post", size, _EPS)
        self.hidden_size = whole(audio, "output_dim", 3584)
        if self.hidden_size != decoder_size(config):
            raise ValueError(f"output_dim={self.hidden_size} of a decoder with {decoder_size(config)}")
        names, sizes = ("linear_1", "linear_2"), (size, size, self.hidden_size)
        self.projector = Perceptron(b.at("projector"), names, sizes, spec.activation, bias=True)
        window = whole(audio, "n_window_infer", 800)
        self.most = self.most_patches = convolved(window)
        self.num_layers = window // CHUNK + len(self.layers)
        first = 4 * inner * (bins // 2 + 1) * CHUNK // 2  # of one chunk, whose first convolution has the most
        self.width = 8 * size + 2 * spec.intermediate_size + 2 * self.hidden_size + first // self.most_patches + 1

    def encoding(self, data: Tensor, layout: tuple[int, ...]) -> Encoding:
        chunks = []
        for chunk in data.to(self.dtype).split(1):
            chunks.append(self._convolved(chunk[:, None]))
            yield
        x = torch.cat(chunks)[: convolved(layout[0])]
        for layer in self.layers:
            x = layer(x)
            yield
        return self.projector(self.norm(x))

    def _convolved(self, x: Tensor) -> Tensor:
        """[1, 1, mel bins, frames] of a chunk to [states, hidden_size]."""
        for convolution in self.convolutions:
            x = convolution(x)
        found: Tensor = self.out(x[0].permute(2, 0, 1).flatten(1)) + self.positions
        return found


def _sinusoids(length: int, size: int) -> Tensor:
    """Return Whisper's positions, [length, size]: sines, then cosines."""
    half = size // 2
    steps = torch.exp(-math.log(_LONGEST_PERIOD) / (half - 1) * torch.arange(half).float())
    angles = torch.arange(length)[:, None] * steps
    return torch.cat([angles.sin(), angles.cos()], dim=1)


def build_tower(config: Mapping[str, Any], processor: Mapping[str, Any], b: Build) -> QwenAsrTower:
    return QwenAsrTower(config, processor, b)
