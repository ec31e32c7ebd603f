"""Whisper's encoder (https://arxiv.org/abs/2212.04356), whose states are averaged in pairs: Qwen2-Audio
(https://arxiv.org/abs/2407.10759) and Audio Flamingo 3 (https://arxiv.org/abs/2507.08128)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from octavo.features.media.towers.layers import Activation, Perceptron, Table, activation
from octavo.features.media.towers.tower import Encoding, Tower, decoder_size
from octavo.models.hf_config import value_or, whole
from octavo.nn.build import Build
from octavo.nn.shard import NONE

_EPS = 1e-5
_KERNEL = 3
_MOST_HALF = torch.finfo(torch.float16).max - 1000


@dataclass(frozen=True, slots=True)
class SpeechSpec:
    """The layers of Whisper's transformer.

    Attributes:
        key_bias: keys have a bias, as queries and values have.
    """

    hidden_size: int
    intermediate_size: int
    heads: int
    layers: int
    activation: Activation
    key_bias: bool

    @classmethod
    def of(cls, audio: Mapping[str, Any], defaults: tuple[int, int, int, int], *, key_bias: bool) -> SpeechSpec:
        """Read an audio_config, whose fields have Whisper's names or the general ones."""
        names = (
            ("d_model", "hidden_size"),
            ("encoder_ffn_dim", "intermediate_size"),
            ("encoder_attention_heads", "num_attention_heads"),
            ("encoder_layers", "num_hidden_layers"),
        )
        sizes = [
            whole(audio, old if old in audio else new, default)
            for (old, new), default in zip(names, defaults, strict=True)
        ]
        size, inner, heads, layers = sizes
        return cls(size, inner, heads, layers, activation(audio, "activation_function", "gelu"), key_bias)


class SpeechLayer(nn.Module):
    """Attention between all states of a window, and a feed-forward; each after a norm and added to the stream."""

    if TYPE_CHECKING:

        def __call__(self, x: Tensor, /) -> Tensor: ...

    def __init__(self, b: Build, spec: SpeechSpec) -> None:
        super().__init__()
        size, inner = spec.hidden_size, spec.intermediate_size
        self.heads, self.activation = spec.heads, spec.activation
        attention = b.at("self_attn")
        self.before_attention = b.layer_norm("self_attn_layer_norm", size, _EPS)
        self.qv = attention.linear("q_proj", "v_proj", inputs=size, outputs=size, shard=NONE, bias=True)
        self.k = attention.linear("k_proj", inputs=size, outputs=size, shard=NONE, bias=spec.key_bias)
        self.out = attention.linear("out_proj", inputs=size, outputs=size, shard=NONE, bias=True)
        self.before_mlp = b.layer_norm("final_layer_norm", size, _EPS)
        self.up = b.linear("fc1", inputs=size, outputs=inner, shard=NONE, bias=True)
        self.down = b.linear("fc2", inputs=inner, outputs=size, shard=NONE, bias=True)

    def forward(self, x: Tensor) -> Tensor:
        """[states, hidden_size] to the same."""
        normed = self.before_attention(x)
        q, v = self.qv.split(self.qv(normed))
        parts = (part.unflatten(-1, (self.heads, -1)).transpose(0, 1)[None] for part in (q, self.k(normed), v))
        mixed = F.scaled_dot_product_attention(*parts)[0]
        x = x + self.out(mixed.transpose(0, 1).flatten(1))
        x = x + self.down(self.activation(self.up(self.before_mlp(x))))
        return x.clamp(-_MOST_HALF, _MOST_HALF) if x.dtype == torch.float16 else x


class Convolution(nn.Module):
    """A convolution with kernels of 3, padded by 1, and a GELU."""

    if TYPE_CHECKING:

        def __call__(self, x: Tensor, /) -> Tensor: ...

    def __init__(self, b: Build, name: str, inputs: int, outputs: int, *, stride: int, axes: int = 1) -> None:
        super().__init__()
        self.stride, self.axes = stride, axes
        self.kernel = Table(b, f"{name}.weight", outputs, inputs, *[_KERNEL] * axes)
        self.bias = Table(b, f"{name}.bias", outputs)

    def forward(self, x: Tensor) -> Tensor:
        """[n, inputs, size ...] to [n, outputs, ceil(size / stride) ...]."""
        convolve = F.conv1d if self.axes == 1 else F.conv2d
        return F.gelu(convolve(x, self.kernel.weight, self.bias.weight, stride=self.stride, padding=1))


class SpeechTower(Tower):
    """A tower of spectrograms.

    Its patches are states of the transformer. One item is computed at a time.
    """

    _numbers: int

    @property
    def patch_numbers(self) -> int:
        return self._numbers

    def workspace_bytes(self, patches: int) -> int:
        return min(patches, self.most_patches) * self.width * self.dtype.itemsize


class WhisperTower(SpeechTower):
    """Only the states of frames that have sound are computed: masks keep the others out of attention."""

    names = ((r"(model\.)?audio_tower\.", "audio."), (r"(model\.)?multi_modal_projector\.", "projector."))

    def __init__(self, config: Mapping[str, Any], processor: Mapping[str, Any], b: Build) -> None:
        super().__init__()
        audio = config["audio_config"]
        spec = SpeechSpec.of(audio, (1280, 5120, 20, 32), key_bias=False)
        size, bins = spec.hidden_size, whole(audio, "num_mel_bins", 128)
        states = whole(audio, "max_source_positions", 1500)
        self.dtype = b.dtype
        self._numbers = 2 * bins
        a = b.at("audio")
        self.first = Convolution(a, "conv1", bins, size, stride=1)
        self.second = Convolution(a, "conv2", size, size, stride=2)
        self.positions = Table(a, "embed_positions.weight", states, size)
        self.layers = nn.ModuleList(SpeechLayer(a.at("layers", i), spec) for i in range(spec.layers))
        self.norm = a.layer_norm("layer_norm", size, _EPS)
        self.hidden_size = decoder_size(config)
        self.projector = _projector(config, b.at("projector"), size, self.hidden_size)
        self.most, self.most_patches = states // 2, states
        self.num_layers = 1 + len(self.layers)
        self.width = 8 * size + 2 * spec.intermediate_size + 2 * self.hidden_size + 2 * (bins + 2 * size)

    def encoding(self, data: Tensor, layout: tuple[int, ...]) -> Encoding:
        states = (layout[0] - 1) // 2 + 1
        x = self.second(self.first(data.to(self.dtype)))[0, :, :states].transpose(0, 1)
        x = x + self.positions.weight[:states]
        yield
        for layer in self.layers:
            x = layer(x)
            yield
        pairs = x[: states // 2 * 2].unflatten(0, (-1, 2)).mean(dim=1)
        found: Tensor = self.projector(self.norm(pairs))
        return found


def _projector(config: Mapping[str, Any], b: Build, size: int, outputs: int) -> nn.Module:
    if str(config["architectures"][0]).startswith("Qwen2Audio"):
        return b.linear("linear", inputs=size, outputs=outputs, shard=NONE, bias=True)
    act = activation(config, "projector_hidden_act", "gelu")
    bias = bool(value_or(config, "projector_bias", True))
    return Perceptron(b, ("linear_1", "linear_2"), (size, outputs, outputs), act, bias=bias)


def build_tower(config: Mapping[str, Any], processor: Mapping[str, Any], b: Build) -> WhisperTower:
    return WhisperTower(config, processor, b)
