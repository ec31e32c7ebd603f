"""Room for the states of recurrent layers in blocks of the KV cache."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from octavo.core.cache_groups import CacheGroup
from octavo.core.errors import ConfigError
from octavo.models.model import ModelSpec
from octavo.models.spec import DecoderSpec
from octavo.nn.attention.base import AttentionSpec
from octavo.nn.cached import CachedLayer
from octavo.nn.latent.base import LatentSpec
from octavo.nn.state import StateCache
from octavo.parallel.stage import Stage

_BLOCK = 16
"""Tokens of a KV block by default."""


def fitting_block_size(
    spec: ModelSpec, layer: AttentionSpec | LatentSpec, kv_dtype: torch.dtype, ranks: int = 1
) -> int:
    """Return the smallest multiple of the default block size that gives each layer room for a state.

    Args:
        layer: attention of one rank, whose keys and values have the same share of a block as a state.
        ranks: those that divide each layer.
    """
    if not isinstance(spec, DecoderSpec) or not isinstance(layer, AttentionSpec) or not spec.attention_layers:
        return _BLOCK
    mixers = [mixer.of_rank(ranks) or mixer for mixer in spec.mixers if mixer is not None]
    largest_state = max((mixer.state_bytes for mixer in mixers), default=0)
    token = 2 * layer.num_kv_heads * layer.head_dim * kv_dtype.itemsize
    return max(1, -(-largest_state // (_BLOCK * token))) * _BLOCK


def largest(layers: Sequence[CachedLayer]) -> int:
    """Return the bytes of the largest state; 0 if there are none."""
    return max((layer.nbytes for layer in layers if isinstance(layer, StateCache)), default=0)


def cells(state_bytes: int, block_size: int) -> int:
    """Return the bytes of a block that holds nothing but a state: a whole number of float32 for each position."""
    return -(-state_bytes // (4 * block_size)) * 4 * block_size


def check(layers: Sequence[CachedLayer], block_size: int, block_bytes: int) -> None:
    """Raise ConfigError if the states of recurrent layers can't be kept here.

    Args:
        block_bytes: a layer's share of a block.
    """
    for layer in layers:
        if not isinstance(layer, StateCache):
            continue
        if layer.nbytes > block_bytes:
            needed = -(-layer.nbytes * block_size // (block_bytes * _BLOCK)) * _BLOCK
            raise ConfigError(
                f"--block-size {block_size} gives a layer {block_bytes} bytes per block of the KV cache, but a state "
                f"of {layer.path} takes {layer.nbytes}. Set --block-size to at least {needed}, or leave it out."
            )


def check_drafts(groups: Sequence[CacheGroup], max_drafts: int, stage: Stage, *, resident: bool) -> None:
    """Raise ConfigError if a feature drafts tokens for recurrent layers where these can't go back to a state.

    The host must know which drafts were rejected: a GPU's slots and the other stages of a pipeline go on without it.

    Args:
        resident: the device is a GPU.
    """
    if max_drafts and (resident or stage.count > 1) and not all(group.grows for group in groups):
        where = "on a GPU" if resident else "in a pipeline"
        raise ConfigError(
            f"A feature drafts tokens, and the model has recurrent layers, whose states can't take back rejected ones "
            f"{where}. Leave the feature out."
        )
