"""`EagleHead`: a decoder layer that predicts a model's next hidden state (EAGLE-1), for training.

After Li et al. 2024 (https://arxiv.org/abs/2401.15077). The model's own embeddings and output head make tokens of it.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional

from octavo.models.save.tensors import save_tensors

_EMBEDDINGS, _OUTPUT, _DIFFERENCES = _TABLES = "embed_tokens.weight", "lm_head.weight", "d2t"
"""Tensors of a stored head besides its parameters."""

Passes = list[tuple[Tensor, Tensor]]
"""Keys and values [B, num_key_value_heads, T, head_dim] of the same positions in several passes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadShape:
    """Fields of the head's config.json, those of the model that it drafts for."""

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float

    @classmethod
    def of(cls, config: dict[str, Any]) -> HeadShape:
        return cls(**{name: config[name] for name in cls.__dataclass_fields__})


class _Attention(nn.Module):
    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self._shape = shape
        size, keys = shape.num_attention_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden_size, size, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, keys, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, keys, bias=False)
        self.o_proj = nn.Linear(size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor, passes: Passes) -> Tensor:
        """Attend causally among positions 0 to T - 1, [B, T, hidden_size] to the same shape; add a pass to `passes`."""
        heads = [part(x).unflatten(-1, (-1, self._shape.head_dim)).transpose(1, 2) for part in self._inputs]
        cos, sin = self._rotation(x.shape[1])
        q, k = (_rotated(part, cos, sin) for part in heads[:2])
        passes.append((k, heads[2]))
        keys, values = (torch.cat(parts, dim=2) for parts in zip(*passes, strict=True))
        seen = _seen(x.shape[1], len(passes), x.device)
        mixed = functional.scaled_dot_product_attention(q, keys, values, attn_mask=seen, enable_gqa=True)
        out: Tensor = self.o_proj(mixed.transpose(1, 2).flatten(2))
        return out

    @property
    def _inputs(self) -> tuple[nn.Linear, nn.Linear, nn.Linear]:
        return self.q_proj, self.k_proj, self.v_proj

    def _rotation(self, count: int) -> tuple[Tensor, Tensor]:
        half = torch.arange(0, self._shape.head_dim, 2, dtype=torch.float64) / self._shape.head_dim
        angles = torch.arange(count, dtype=torch.float64)[:, None] * self._shape.rope_theta**-half
        angles = torch.cat([angles, angles], dim=-1).to(self.q_proj.weight.device)
        return angles.cos().to(self.q_proj.weight.dtype), angles.sin().to(self.q_proj.weight.dtype)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


def _seen(count: int, passes: int, device: torch.device) -> Tensor:
    """Return which positions of all passes each position of the last one attends to, [count, passes * count]."""
    places = torch.arange(count, device=device)
    behind = places[:, None] - places
    last = [behind == offset for offset in range(passes - 2, -1, -1)]
    return torch.cat([behind >= passes - 1, *last], dim=1)


class _Mlp(nn.Module):
    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class _Layer(nn.Module):
    """A decoder layer without a norm of its input, as in the published heads."""

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self.self_attn = _Attention(shape)
        self.mlp = _Mlp(shape)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)

    def forward(self, x: Tensor, passes: Passes) -> Tensor:
        x = x + self.self_attn(x, passes)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class EagleHead(nn.Module):
    """Predicts the model's hidden state after its final norm, at the next position.

    Names of parameters are those of the published checkpoints. An untrained head returns its input state.
    """

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self.shape = shape
        self.fc = nn.Linear(2 * shape.hidden_size, shape.hidden_size)
        layer = _Layer(shape)
        self.layers = nn.ModuleList([layer])
        self._begin(layer)

    def _begin(self, layer: _Layer) -> None:
        size = self.shape.hidden_size
        with torch.no_grad():
            self.fc.weight[:, :size].zero_()
            self.fc.weight[:, size:].copy_(torch.eye(size))
            self.fc.bias.zero_()
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()

    def forward(self, embeddings: Tensor, states: Tensor, passes: Passes | None = None) -> Tensor:
        """Return the predicted hidden states of the next positions, [B, T, hidden_size].

        Args:
            embeddings: [B, T, hidden_size], of the token after each position.
            states: [B, T, hidden_size], the model's hidden states; in a further pass the states that the pass before
                has predicted for the same positions.
            passes: the passes before; this one is added. In pass n, each position attends to itself and the n - 2
                positions before it as pass n, n - 1, ..., 2 has computed them, and to all earlier ones of the first:
                as when the head draws its n-th draft.
        """
        x: Tensor = self.fc(torch.cat([embeddings, states], dim=-1))
        for layer in self.layers:
            x = layer(x, [] if passes is None else passes)
        return x


class DraftVocabulary(NamedTuple):
    """The only tokens that a head draws.

    Attributes:
        tokens: [n] int64, ascending.
        output: [n, hidden_size], their rows of the model's output head.
    """

    tokens: Tensor
    output: Tensor


def save_head(
    head: EagleHead,
    embeddings: Tensor,
    folder: Path,
    *,
    drawn: DraftVocabulary | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    """Write the head in the layout of the published ones: model.safetensors with the embedding table, and config.json.

    Args:
        embeddings: [vocab_size, hidden_size], those of the model.
        drawn: None for all tokens of the model; else `lm_head` and `d2t` are stored, too, as in heads of EAGLE-3.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: value.detach().to("cpu", dtype).contiguous() for name, value in head.state_dict().items()}
    tensors[_EMBEDDINGS] = embeddings.to("cpu", dtype).contiguous()
    if drawn is not None:
        tensors[_OUTPUT] = drawn.output.to("cpu", dtype).contiguous()
        tensors[_DIFFERENCES] = drawn.tokens.cpu() - torch.arange(len(drawn.tokens))
    save_tensors(tensors, folder / "model.safetensors")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "hidden_act": "silu",
        "bias": True,
        "torch_dtype": str(dtype).removeprefix("torch."),
        **asdict(head.shape),
    }
    if drawn is not None:
        config["draft_vocab_size"] = len(drawn.tokens)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def load_head(folder: Path) -> EagleHead:
    """Read a head that `save_head` wrote, as float32."""
    head = EagleHead(HeadShape.of(json.loads((folder / "config.json").read_text(encoding="utf-8"))))
    stored = load_file(folder / "model.safetensors")
    head.load_state_dict({name: value.float() for name, value in stored.items() if name not in _TABLES})
    return head
