"""Choose the attention backend of a model's layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from octavo.core.errors import ConfigError
from octavo.nn.attention.base import AttentionSpec, BackendRequest
from octavo.nn.attention.native import NativeBackend
from octavo.nn.attention.select import select
from octavo.nn.build import AnyBackend
from octavo.nn.latent.base import LatentSpec
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
) -> tuple[AnyBackend, CacheShape]:
    """Return the backend called `name`, or the fastest one for the layer, and the shape of its cache.

    Args:
        isa, libraries: see `BackendRequest`.

    Raises:
        ConfigError: the backend, the instruction set or the cache's dtype can't be used here.
    """
    backend: AnyBackend
    if isinstance(layer, LatentSpec):
        latents = backend = select_latents(name, LatentRequest(device, dtype, layer, kv_dtype, isa, libraries))
        shape: CacheShape = partial(latents.cache_shape, layer)
    else:
        request = BackendRequest(device, dtype, layer, block_size, isa, kv_dtype, libraries)
        keys = backend = select(name, request)
        shape = partial(keys.cache_shape, layer)
    if isa != "auto" and not isinstance(backend, NativeBackend):
        raise ConfigError(
            f"--cpu-isa {isa} chooses among Octavo's CPU kernels, but attention runs in {backend.name!r} here "
            "(--attention-backend native gives the reason). Leave it out."
        )
    return backend, shape
