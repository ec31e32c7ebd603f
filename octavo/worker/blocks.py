"""`Blocks`: the KV cache of all layers in one allocation, so that a block is copied for all its layers at once."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from octavo.core.cache_groups import CacheGroup
from octavo.device.transfer import Link
from octavo.nn.cached import CachedLayer


class Blocks:
    """One tensor [layers of a group, blocks, ...]; each layer's `cache` is a view of it.

    Layer i of every group has the same view: a block belongs to one group at a time.

    Attributes:
        size: tokens per block.
    """

    def __init__(
        self,
        layers: Sequence[CachedLayer],
        groups: Sequence[CacheGroup],
        shape: Sequence[int],
        size: int,
        dtype: torch.dtype,
        link: Link,
        own: Sequence[Sequence[int]] = (),
    ) -> None:
        """Allocate the cache and bind it to the layers.

        Args:
            shape: of one layer's cache, `AttentionBackend.cache_shape`; if layers differ, blocks and their elements.
            own: in that case, the shape of each layer's cache; the layer gets a view of a part of each block.
        """
        self.size = size
        self._layers = layers
        self._link = link
        count = max((group.num_tensors for group in groups), default=0)
        self._cache = torch.empty((count, *shape), dtype=dtype, device=link.torch_device)
        for number, group in enumerate(groups):
            for place, layer in enumerate(group.layers):
                tensor, part = divmod(place, group.together)
                cache = self._cache[tensor]
                layers[layer].cache = _part_of(cache, part, own[layer]) if own else cache
                layers[layer].group = number

    @classmethod
    def none(cls, link: Link) -> Blocks:
        """Return the empty cache of a model without KV."""
        return cls((), (), (0,), 1, torch.float32, link)

    def copy(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy (source, destination) blocks one after the other, in all layers: one gather and one scatter."""
        origin: dict[int, int] = {}
        for source, destination in copies:
            origin[destination] = origin.get(source, source)
        pairs = self._link.upload(np.array([list(origin.values()), list(origin)], dtype=np.int64))
        cells = self._cache.view(torch.uint8) if self._cache.dtype.itemsize == 1 else self._cache
        cells.index_copy_(1, pairs[1], cells.index_select(1, pairs[0]))

    @property
    def caches(self) -> Tensor:
        """The caches of all layers of a group, [layers, blocks, ...]."""
        return self._cache

    @property
    def count(self) -> int:
        """Number of blocks."""
        return self._cache.shape[1]

    @property
    def page_bytes(self) -> int:
        """Bytes of a block in all layers of a group."""
        return self.memory.shape[0] * self.memory.shape[2]

    def gather(self, blocks: Sequence[int]) -> Tensor:
        """Return the contents of blocks in all layers, [n, page bytes] uint8 on the device."""
        return self.memory.index_select(1, self._indices(blocks)).transpose(0, 1).flatten(1)

    def scatter(self, blocks: Sequence[int], pages: Tensor) -> None:
        """Overwrite blocks with pages, [n, page bytes] uint8 on the device."""
        cells = self.memory
        layers, _, width = cells.shape
        cells.index_copy_(1, self._indices(blocks), pages.view(len(blocks), layers, width).transpose(0, 1))

    @property
    def memory(self) -> Tensor:
        """The cache as [layers of a group, blocks, bytes] uint8, at the same address until `close`."""
        return self._cache.flatten(2).view(torch.uint8)

    def _indices(self, blocks: Sequence[int]) -> Tensor:
        return self._link.upload(np.array(blocks, dtype=np.int64))

    def close(self) -> None:
        """Free the memory."""
        self._cache = torch.empty(0)
        for layer in self._layers:
            layer.cache = torch.empty(0)


def _part_of(cache: Tensor, part: int, shape: Sequence[int]) -> Tensor:
    """Return a part of each block of a cache [blocks, elements], as a view of this shape."""
    each = math.prod(shape[1:])
    own: Tensor = cache[:, part * each : (part + 1) * each].unflatten(1, tuple(shape[1:]))
    return own
