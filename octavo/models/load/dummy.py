"""Random weights of the right shapes, for measuring without a checkpoint."""

from __future__ import annotations

import zlib
from collections.abc import Set

import torch
from torch import Tensor

from octavo.nn.weights import Index, QuantizedBlocks, TensorSpec

# A prime, so that a matrix's rows, whose lengths are usually round, start at different offsets of the pool.
_POOL = 1_048_573


class DummyCheckpoint:
    """Has a tensor of every name. The same seed gives the same model, in any order of reading and on any device.

    Values are from one pool of normal numbers, repeated, since drawing billions would take minutes. Matrices are scaled
    by 1 / sqrt(inputs) so that activations neither vanish nor explode; norms are near one, biases small.
    """

    origin = "random weights"

    def __init__(self, seed: int, device: str = "cpu") -> None:
        generator = torch.Generator().manual_seed(seed)
        self._pool = torch.randn(_POOL, generator=generator).to(device)

    def names(self) -> Set[str]:
        return frozenset()

    def has(self, name: str) -> bool:
        return True

    def shape(self, name: str) -> tuple[int, ...] | None:
        return None

    def blocks(
        self, name: str, entry: int | None = None, *, codes: bool = False, index: Index | None = None
    ) -> QuantizedBlocks | None:
        return None

    def tensor(self, name: str, spec: TensorSpec, index: Index | None = None) -> Tensor:
        whole = self._values(name, spec).view(spec.shape)
        return whole if index is None else whole[index]

    def _values(self, name: str, spec: TensorSpec) -> Tensor:
        pool = self._pool.roll(zlib.crc32(name.encode()) % _POOL)
        if len(spec.shape) > 1:
            pool = pool * spec.shape[-1] ** -0.5
        else:
            pool = pool * 0.02 + (0.0 if name.endswith(".bias") else 1.0)
        pool = pool.to(spec.dtype)
        size = torch.Size(spec.shape).numel()
        out = torch.empty(size, dtype=spec.dtype, device=pool.device)
        full = size // _POOL
        out[: full * _POOL].view(full, _POOL).copy_(pool.expand(full, _POOL))
        out[full * _POOL :] = pool[: size - full * _POOL]
        return out
