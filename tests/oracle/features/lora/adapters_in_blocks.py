"""Adapters with random weights in the blocks of a KV cache, and what they add, in float64."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from octavo.device.transfer import link_of
from octavo.features.lora.layout import Geometry, Manifest, Piece, Span, Target, TargetPart, layout
from octavo.features.lora.tables import Assigned, Tables

Factors = tuple[Tensor, Tensor]
"""A [rank, in] and B [out, rank]."""


def drawn(inputs: int, outputs: int, rank: int, generator: torch.Generator, dtype: torch.dtype) -> Factors:
    a = (torch.randn(rank, inputs, generator=generator) * inputs**-0.5).to(dtype)
    return a, (torch.randn(outputs, rank, generator=generator) * rank**-0.5).to(dtype)


def put(pool: Tensor, blocks: Sequence[int], geometry: Geometry, span: Span, a: Tensor, b: Tensor) -> None:
    """Write a piece into an adapter's blocks of a pool [slices, blocks, elements of a slice]."""
    tile = geometry.tile_bytes // geometry.element_size

    def write(at: int, row: Tensor) -> None:
        for piece in row.split(tile):
            place = at // geometry.slice_tiles
            start = at % geometry.slice_tiles * tile
            pool[place % geometry.slices, blocks[place // geometry.slices], start : start + len(piece)] = piece
            at += 1

    (rank, inputs), outputs = a.shape, len(b)
    for i in range(rank):
        write(span.a + i * geometry.row_tiles(inputs), a[i])
    if geometry.by_output:
        write(span.b, F.pad(b, (0, geometry.stride(rank) - rank)).flatten())
    else:
        for i in range(rank):
            write(span.b + i * geometry.row_tiles(outputs), b[:, i])


class World:
    """Adapters of one target among others, in random blocks.

    Attributes:
        pool: [slices, blocks, elements of a slice]; what no adapter holds is NaN.
        factors: adapter -> part -> its matrices; None where the adapter leaves the part alone.
    """

    def __init__(
        self,
        inputs: int,
        sizes: Sequence[int],
        ranks: Sequence[Sequence[int]],
        *,
        dtype: torch.dtype,
        device: torch.device,
        seed: int,
        slices: int = 3,
        slice_bytes: int = 768,
        by_output: bool = False,
    ) -> None:
        """
        Args:
            ranks: of each adapter's parts; 0 leaves a part alone.
            by_output: the form of B; see `Geometry`.
        """
        rng = random.Random(seed)
        generator = torch.Generator().manual_seed(seed)
        parts = tuple(TargetPart(f"p{i}", inputs, size, inputs, size) for i, size in enumerate(sizes))
        before = Target("before", (TargetPart("q", 5, 7, 5, 7),) * 4)
        self.target = Target("target", parts)
        self.index = 1
        geometry = Geometry(slices, slice_bytes, dtype.itemsize, by_output)
        manifests = [
            Manifest((Piece(0, 0, rank=2), *(Piece(1, part, rank=rank) for part, rank in enumerate(own) if rank)))
            for own in ranks
        ]
        layouts = [layout([before, self.target], manifest, geometry) for manifest in manifests]
        total = sum(one.num_blocks for one in layouts)
        free = rng.sample(range(total + 7), total)
        most = max(one.num_blocks for one in layouts) + 2
        elements = slice_bytes // dtype.itemsize
        pool = torch.full((slices, total + 7, elements), math.nan, dtype=dtype)
        self.tables = Tables([before, self.target], geometry, len(ranks) + 2, most, link_of(device))
        self.factors: list[list[Factors | None]] = []
        for index, (own, placed) in enumerate(zip(ranks, layouts, strict=True)):
            blocks, free = free[: placed.num_blocks], free[placed.num_blocks :]
            self.tables.enter(index, blocks, placed)
            self.factors.append([])
            for part, (rank, size) in enumerate(zip(own, sizes, strict=True)):
                if not rank:
                    self.factors[-1].append(None)
                    continue
                a, b = drawn(inputs, size, rank, generator, dtype)
                put(pool, blocks, geometry, placed.spans[1, part], a, b)
                self.factors[-1].append((a, b))
        self.pool = pool.to(device)
        self.sizes = list(sizes)
        self._link = link_of(device)

    def assigned(self, adapters: Sequence[int], max_rows: int) -> Assigned:
        """Return the tables of a step whose rows have these adapters; -1 for none."""
        rows = Assigned(max_rows, self.tables.max_adapters, self._link, most_groups=8)
        rows.fill(np.array(adapters, dtype=np.int32), self.tables.rank_groups)
        return rows

    def addition(self, x: Tensor, adapters: Sequence[int]) -> Tensor:
        """Return what is added for x [T, in]: [T, out] float64."""
        found = torch.zeros(len(x), sum(self.sizes), dtype=torch.float64)
        for row, adapter in enumerate(adapters):
            if adapter < 0:
                continue
            for factors, place in zip(self.factors[adapter], found[row].split(self.sizes), strict=True):
                if factors is not None:
                    a, b = (factor.double() for factor in factors)
                    place += b @ (a @ x[row].double())
        return found
