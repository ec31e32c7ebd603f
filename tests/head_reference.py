"""Drafting heads in plain torch, written from the papers: whole sequences, no cache, one draft after the other.

Weights are those of a checkpoint in the published layout, by name. `h` are the target's hidden states of all known
tokens but the last; position p pairs h[p] with the token at p + 1.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

Weights = dict[str, Tensor]
EPS = 1e-5


def rms(x: Tensor, weight: Tensor, eps: float = EPS) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def rotated(x: Tensor, theta: float) -> Tensor:
    """Rotary positions (https://arxiv.org/abs/2104.09864) of x [T, heads, dim], halves paired."""
    half = x.shape[-1] // 2
    angles = torch.arange(len(x))[:, None] * theta ** (-torch.arange(half) / half)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def attention(x: Tensor, w: Weights, at: str, heads: int, kv_heads: int, theta: float = 10000.0) -> Tensor:
    """Causal attention over x [T, inputs] in full."""
    q, k, v = (F.linear(x, w[f"{at}.{name}_proj.weight"], w.get(f"{at}.{name}_proj.bias")) for name in "qkv")
    q = rotated(q.unflatten(-1, (heads, -1)), theta)
    k = rotated(k.unflatten(-1, (kv_heads, -1)), theta)
    k, v = (part.repeat_interleave(heads // kv_heads, 1) for part in (k, v.unflatten(-1, (kv_heads, -1))))
    scores = torch.einsum("qhd,khd->hqk", q, k) * q.shape[-1] ** -0.5
    scores = scores.masked_fill(torch.ones(len(x), len(x), dtype=torch.bool).triu(1), float("-inf"))
    mixed = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).flatten(1)
    return F.linear(mixed, w[f"{at}.o_proj.weight"])


def mlp(x: Tensor, w: Weights, at: str) -> Tensor:
    gate, up = (F.linear(x, w[f"{at}.{name}_proj.weight"]) for name in ("gate", "up"))
    return F.linear(F.silu(gate) * up, w[f"{at}.down_proj.weight"])


def eagle(w: Weights, embedded: Tensor, h: Tensor, heads: int, kv_heads: int) -> Tensor:
    """EAGLE (https://arxiv.org/abs/2401.15077, section 4.1): predicted states [T, size]."""
    x = F.linear(torch.cat([embedded, h], -1), w["fc.weight"], w.get("fc.bias"))
    x = x + attention(x, w, "layers.0.self_attn", heads, kv_heads)  # no norm before it
    return x + mlp(rms(x, w["layers.0.post_attention_layernorm.weight"]), w, "layers.0.mlp")


def eagle3(w: Weights, embedded: Tensor, h: Tensor, heads: int, kv_heads: int, *, normed: bool) -> Tensor:
    """EAGLE-3 (https://arxiv.org/abs/2503.01840, section 3.2): states [T, size] before the final norm.

    Args:
        normed: the residual begins with the normed state (`norm_before_residual`).
    """
    at = "midlayer"
    pair = [rms(embedded, w[f"{at}.input_layernorm.weight"]), rms(h, w[f"{at}.hidden_norm.weight"])]
    x = (pair[1] if normed else h) + attention(torch.cat(pair, -1), w, f"{at}.self_attn", heads, kv_heads)
    return x + mlp(rms(x, w[f"{at}.post_attention_layernorm.weight"]), w, f"{at}.mlp")


def draft(
    kind: str,
    w: Weights,
    tokens: list[int],
    h: Tensor,
    count: int,
    heads: int,
    kv_heads: int,
    table: Tensor,
    *,
    normed: bool = False,
    ranks: Sequence[int] = (),
) -> list[int]:
    """Return `count` drafts after `tokens`, each the likeliest one.

    Args:
        h: [len(tokens) - 1, size], the states that the head reads; for EAGLE-3 [len(tokens) - 1, 3 size].
        table: the target's embedding [vocab, size].
        normed: see `eagle3`.
        ranks: how many likelier ones there are than each draft, if not none.
    """
    if kind == "eagle3":
        h = rms(h, w["input_norm.weight"]) if "input_norm.weight" in w else h
        h = F.linear(h, w["fc.weight"])
    following, drafts = list(tokens[1:]), []
    for rank in ranks or [0] * count:
        embedded = table[torch.tensor(following)]
        known = (w, embedded, h, heads, kv_heads)
        out = (eagle(*known) if kind == "eagle" else eagle3(*known, normed=normed))[-1:]
        if kind == "eagle":
            logits = F.linear(out, w["lm_head.weight"])[0]
        else:
            logits = F.linear(rms(out, w["norm.weight"]), w["lm_head.weight"])[0]
        token = int(logits.topk(1 + rank).indices[-1])
        token += int(w["d2t"][token]) if "d2t" in w else 0
        drafts.append(token)
        following.append(token)
        h = torch.cat([h, out])
    return drafts
