"""Choose the attention backend of a model's layers, and how they share the blocks of the KV cache."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch

from octavo.core.cache_groups import CacheGroup
from octavo.core.errors import ConfigError
from octavo.nn.attention.base import AttentionSpec, BackendRequest
from octavo.nn.attention.layer import PagedAttention
from octavo.nn.attention.native import NativeBackend
from octavo.nn.attention.select import select
from octavo.nn.build import AnyBackend
from octavo.nn.cached import CachedLayer
from octavo.nn.latent.base import LatentBackend, LatentSpec
from octavo.nn.latent.select import LatentRequest, select_latents

CacheShape = Callable[[int, int], tuple[int, ...]]
"""Number of blocks, block size -> shape of one layer's cache tensor."""


def choose_attention(
    name: str | None,
    layer: AttentionSpec | LatentSpec,
    device: torch.device,
    dtype: torch.dtype,
    *,
    kv_dtype: torch.dtype,
    block_size: int,
    isa: str,
    libraries: Sequence[str],
    invariant: bool = False,
) -> tuple[AnyBackend, CacheShape]:
    """Return the backend called `name`, or the fastest one for the layer, and the shape of its cache.

    Args:
        isa, libraries, invariant: see `BackendRequest`.

    Raises:
        ConfigError: the backend, the instruction set or the cache's dtype can't be used here.
    """
    backend: AnyBackend
    if isinstance(layer, LatentSpec):
        if invariant and device.type != "cpu":
            raise ConfigError(
                "--batch-invariant: latent attention on a GPU depends on the batch. Leave it out, or serve the model "
                "on a CPU."
            )
        latents = backend = select_latents(name, LatentRequest(device, dtype, layer, kv_dtype, isa, libraries))
        shape: CacheShape = partial(latents.cache_shape, layer)
    else:
        request = BackendRequest(device, dtype, layer, block_size, isa, kv_dtype, libraries, invariant)
        keys = backend = select(name, request)
        shape = partial(keys.cache_shape, layer)
    if isa != "auto" and not isinstance(backend, NativeBackend):
        raise ConfigError(
            f"--cpu-isa {isa} chooses among Octavo's CPU kernels, but attention runs in {backend.name!r} here "
            "(--attention-backend native gives the reason). Leave it out."
        )
    return backend, shape


def own_shapes(
    layers: Sequence[CachedLayer], attention: AnyBackend, num_blocks: int, block_size: int
) -> list[tuple[int, ...]]:
    """Return the shape of each layer's cache; none unless all layers attend to keys and values."""
    own = [layer for layer in layers if isinstance(layer, PagedAttention)]
    if isinstance(attention, LatentBackend) or len(own) < len(layers):
        return []
    return [attention.cache_shape(layer.spec, num_blocks, block_size) for layer in own]


def common_page(layers: Sequence[CachedLayer], attention: AnyBackend, block_size: int) -> int:
    """Return the elements of a block in a cache tensor that layers of several shapes share; 0 if all have one shape."""
    shapes = set(own_shapes(layers, attention, 1, block_size))
    return max(map(math.prod, shapes)) if len(shapes) > 1 else 0


def kinds_of(layers: Sequence[CachedLayer], attention: AnyBackend, block_size: int, page: int) -> list[CacheGroup]:
    """Return what each layer keeps, for `groups_of`. `page`: the result of `common_page`."""
    kinds = [layer.keeps(block_size) for layer in layers]
    if not page:
        return kinds
    shapes = own_shapes(layers, attention, 1, block_size)
    return [replace(kind, together=page // math.prod(shape)) for kind, shape in zip(kinds, shapes, strict=True)]
