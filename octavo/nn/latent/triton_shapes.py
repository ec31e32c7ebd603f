"""Launch shapes of the latent attention kernels."""

from __future__ import annotations

from typing import NamedTuple

import torch

from octavo.device.launch_sizes import next_power_of_2
from octavo.nn.attention.triton_shapes import has_large_tiles

_MOST_ROWS = 64
"""Heads times queries of a tile: the height of Hopper's matrix instruction."""
_CHANNELS = 320
"""Most channels of a key and a value: two tiles of them fit the shared memory beside the queries."""


class AbsorbedShape(NamedTuple):
    """Launch shape of the absorbed kernel.

    Attributes:
        group: heads of a tile.
        rows: heads times queries, padded.
        keys: of a tile; a latent is up to 1,152 bytes, so few fit.
    """

    group: int
    rows: int
    keys: int
    warps: int
    stages: int


def absorbed_shape(dtype: torch.dtype, heads: int, queries: int) -> AbsorbedShape:
    """Return the shape for tiles of `queries` queries of a row."""
    group = min(next_power_of_2(heads), max(1, _MOST_ROWS // queries))
    rows = max(16, group * queries)
    if dtype.itemsize == 4:
        return AbsorbedShape(group, rows, 16, 4, 1)
    return AbsorbedShape(group, rows, 64, 8, 2) if rows > 32 else AbsorbedShape(group, rows, 32, 4, 2)


def tile_queries(heads: int) -> int:
    """Return the queries of an absorbed tile of a row with many."""
    return max(1, _MOST_ROWS // next_power_of_2(heads))


class ExpandedShape(NamedTuple):
    """Launch shape of the expanded kernel: queries and keys of a tile."""

    queries: int
    keys: int
    warps: int
    stages: int


def expanded_shape(dtype: torch.dtype, channels: int, device: torch.device) -> ExpandedShape:
    """Return the shape for this many channels of a key and a value."""
    if dtype.itemsize == 4:
        return ExpandedShape(32, 32, 4, 1)
    return ExpandedShape(128, 64, 8, 3 if channels <= _CHANNELS and has_large_tiles(device) else 2)
