"""Layers that several towers have."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from octavo.core.errors import ConfigError
from octavo.models.hf_config import value_or, whole
from octavo.nn.build import Build
from octavo.nn.shard import NONE
from octavo.nn.weights import Stored, TensorSpec, Wanted, WeightLayer, owned, plain, tensor_bytes

Activation = Callable[[Tensor], Tensor]


def quick_gelu(x: Tensor) -> Tensor:
    """CLIP's approximation of GELU."""
    return x * torch.sigmoid(1.702 * x)


def tanh_gelu(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


_ACTIVATIONS: Mapping[str, Activation] = {
    "gelu": F.gelu,
    "gelu_pytorch_tanh": tanh_gelu,
    "gelu_new": tanh_gelu,
    "quick_gelu": quick_gelu,
    "relu": F.relu,
    "silu": F.silu,
}


def activation(config: Mapping[str, Any], name: str, default: str) -> Activation:
    """Return an activation by the name in a configuration's field. Raise ConfigError if there is none of it."""
    value = config.get(name) or default
    if value not in _ACTIVATIONS:
        raise ConfigError(f"The model's config asks for {name}={value!r}; Octavo supports {', '.join(_ACTIVATIONS)}.")
    return _ACTIVATIONS[value]


class Table(WeightLayer):
    """One tensor, as it is stored."""

    def __init__(self, b: Build, name: str, *shape: int) -> None:
        super().__init__(b.at(name).path, b.device)
        self._spec = TensorSpec(shape, b.dtype)
        self.weight = torch.empty(0)

    def wanted(self) -> list[Wanted]:
        return [Wanted(self.path, self._spec)]

    def place(self, tensors: Sequence[Stored | None]) -> None:
        (found,) = tensors
        self.weight = owned(plain(found))

    @property
    def nbytes(self) -> int:
        return tensor_bytes(self.weight)


@dataclass(frozen=True, slots=True)
class VitSpec:
    """The layers of CLIP's and SigLIP's transformers, which have norms before each part.

    Attributes:
        layers: of them, the first ones that are used.
    """

    hidden_size: int
    intermediate_size: int
    heads: int
    layers: int
    eps: float
    activation: Activation

    @classmethod
    def of_siglip(cls, vision: Mapping[str, Any], size: int, heads: int = 12) -> VitSpec:
        """Read a vision_config of SigLIP's kind. `heads`: their default number."""
        return cls(
            size,
            whole(vision, "intermediate_size", 3072),
            whole(vision, "num_attention_heads", heads),
            whole(vision, "num_hidden_layers", 12),
            float(value_or(vision, "layer_norm_eps", 1e-6)),
            activation(vision, "hidden_act", "gelu_pytorch_tanh"),
        )


class Attention(nn.Module):
    """Attention between all tokens of an image."""

    if TYPE_CHECKING:

        def __call__(self, x: Tensor, /) -> Tensor: ...

    def __init__(self, b: Build, spec: VitSpec) -> None:
        super().__init__()
        size = spec.hidden_size
        self.heads = spec.heads
        self.qkv = b.linear("q_proj", "k_proj", "v_proj", inputs=size, outputs=size, shard=NONE, bias=True)
        self.out = b.linear("out_proj", inputs=size, outputs=size, shard=NONE, bias=True)

    def forward(self, x: Tensor) -> Tensor:
        """[n, tokens, hidden_size] to the same."""
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv.split(self.qkv(x)))
        mixed = F.scaled_dot_product_attention(q, k, v)
        return self.out(mixed.transpose(1, 2).flatten(2))


class VitLayer(nn.Module):
    """Attention and feed-forward, each after a norm and added to the stream."""

    if TYPE_CHECKING:

        def __call__(self, x: Tensor, /) -> Tensor: ...

    def __init__(self, b: Build, spec: VitSpec) -> None:
        super().__init__()
        size = spec.hidden_size
        self.activation = spec.activation
        self.before_attention = b.layer_norm("layer_norm1", size, spec.eps)
        self.attention = Attention(b.at("self_attn"), spec)
        self.before_mlp = b.layer_norm("layer_norm2", size, spec.eps)
        mlp = b.at("mlp")
        self.up = mlp.linear("fc1", inputs=size, outputs=spec.intermediate_size, shard=NONE, bias=True)
        self.down = mlp.linear("fc2", inputs=spec.intermediate_size, outputs=size, shard=NONE, bias=True)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.before_attention(x))
        return x + self.down(self.activation(self.up(self.before_mlp(x))))


class Patches(nn.Module):
    """Embeds square patches: a convolution without overlap."""

    if TYPE_CHECKING:

        def __call__(self, x: Tensor, /) -> Tensor: ...

    def __init__(self, b: Build, name: str, size: int, patch: int, *, bias: bool) -> None:
        super().__init__()
        self.patch = patch
        self.kernel = Table(b, f"{name}.weight", size, 3, patch, patch)
        self.bias = Table(b, f"{name}.bias", size) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """[n, 3, height, width] to [n, patches, size], row by row."""
        bias = None if self.bias is None else self.bias.weight
        return F.conv2d(x, self.kernel.weight, bias, stride=self.patch).flatten(2).transpose(1, 2)


class Perceptron(nn.Module):
    """Two linear layers with an activation in between: LLaVA's projector."""

    if TYPE_CHECKING:

        def __call__(self, x: Tensor, /) -> Tensor: ...

    def __init__(self, b: Build, names: tuple[str, str], sizes: tuple[int, int, int], act: Activation, *, bias: bool):
        super().__init__()
        self.activation = act
        self.first = b.linear(names[0], inputs=sizes[0], outputs=sizes[1], shard=NONE, bias=bias)
        self.second = b.linear(names[1], inputs=sizes[1], outputs=sizes[2], shard=NONE, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.activation(self.first(x)))


def gathered(x: Tensor, side: int, scale: int) -> Tensor:
    """Concatenate the states of each square of patches: [n, side ** 2, size] to [n, (side / scale) ** 2, size *
    scale ** 2]."""
    count = side // scale
    squares = x.unflatten(1, (count, scale, count, scale))
    made: Tensor = squares.transpose(2, 3).flatten(3).flatten(1, 2)
    return made
