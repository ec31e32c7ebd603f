"""`CachedLayer`: what the worker needs to know of a layer that keeps something of a sequence between steps."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from octavo.core.cache_groups import CacheGroup


class CachedLayer(Protocol):
    """Attention (`attention/layer.py`) or a recurrent layer's states (`state.py`).

    Attributes:
        path: in the checkpoint's vocabulary.
        cache: [blocks, ...]; the worker binds it. Empty until then.
        group: the cache group that the layer belongs to; the worker sets it.
    """

    path: str
    cache: Tensor
    group: int

    def keeps(self, block_size: int) -> CacheGroup:
        """Return the kind of the layer's group: a group without layers. Layers that keep the same share a group."""
        ...
