"""Latent attention in GGUF files: newer converters store the expansion of latents to keys and values in halves."""

from __future__ import annotations

import re
from collections.abc import Set

import torch
from torch import Tensor

from octavo.models.load.checkpoint import Checkpoint
from octavo.nn.weights import Index, QuantizedBlocks, TensorSpec

_KEYS = re.compile(r"(blk\.\d+\.)attn_k_b\.weight")


class JoinedLatents:
    """A view of `source` in which `attn_k_b` [heads, rank, nope] and `attn_v_b` [heads, value, rank] are one tensor
    `attn_kv_b` [heads * (nope + value), rank], as in older files and in Hugging Face's checkpoints."""

    def __init__(self, source: Checkpoint) -> None:
        self.origin = source.origin
        self._source = source
        layers = [match[1] for name in source.names() if (match := _KEYS.fullmatch(name))]
        self._halves = {
            f"{layer}attn_kv_b.weight": (f"{layer}attn_k_b.weight", f"{layer}attn_v_b.weight") for layer in layers
        }
        stored = {half for halves in self._halves.values() for half in halves}
        self._names = (source.names() - stored) | self._halves.keys()

    def names(self) -> Set[str]:
        return self._names

    def has(self, name: str) -> bool:
        return name in self._names

    def shape(self, name: str) -> tuple[int, ...] | None:
        if name not in self._halves:
            return self._source.shape(name)
        keys, values = (self._source.shape(half) for half in self._halves[name])
        assert keys is not None, "a file of tensors has shapes"
        assert values is not None, "a file of tensors has shapes"
        return keys[0] * (keys[2] + values[1]), keys[1]

    def blocks(
        self, name: str, entry: int | None = None, *, codes: bool = False, index: Index | None = None
    ) -> QuantizedBlocks | None:
        return None if name in self._halves else self._source.blocks(name, entry, codes=codes, index=index)

    def tensor(self, name: str, spec: TensorSpec, index: Index | None = None) -> Tensor:
        if name not in self._halves:
            return self._source.tensor(name, spec, index)
        keys, values = (self._source.tensor(half, spec) for half in self._halves[name])
        whole = torch.cat([keys.transpose(1, 2), values], dim=1).flatten(0, 1)
        return whole if index is None else whole[index]


def with_joined_latents(checkpoint: Checkpoint) -> Checkpoint:
    """Return the checkpoint with keys' and values' expansions joined; the same if it has none apart."""
    if not any(_KEYS.fullmatch(name) for name in checkpoint.names()):
        return checkpoint
    return JoinedLatents(checkpoint)
