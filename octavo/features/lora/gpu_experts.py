"""`KernelExperts`: the additions of adapters to experts on a GPU, for choices that are sorted by expert."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from octavo.device.launch_sizes import cdiv
from octavo.features.lora.kernels import Form
from octavo.features.lora.layout import Target
from octavo.features.lora.tables import RANKS, Batch, Tables
from octavo.features.lora.triton_experts import expert_expand_kernel, expert_shrink_kernel
from octavo.nn.delta import ExpertsDelta, SortedChoices
from octavo.nn.ops.triton_overlap import overlap

_ROWS = 16
"""Places of a program, the least that the matrix units take."""
_OUTPUTS = 128
"""Of a program that multiplies with B."""


class KernelExperts(ExpertsDelta):
    """The additions of all adapters to the experts of one layer."""

    sorts = True

    def __init__(
        self, pool: Tensor, tables: Tables, targets: tuple[Target, Target], first: int, max_rank: int, batch: Batch
    ) -> None:
        """
        Args:
            pool: [slices, blocks, elements of a slice], the KV cache in the adapters' dtype.
            targets: both products of the first expert, before and after the gate; `kernels.serves` accepts them.
            first: index in `tables` of the first of them. Those of the other experts follow.
            max_rank: the largest rank of a part.
        """
        self._pool, self._tables, self._batch = pool, tables, batch
        self._targets, self._first = targets, first
        geometry = tables.geometry
        self._fixed: dict[str, Any] = {
            "RANKS": Form.of(pool.dtype, geometry, 1, max_rank).ranks,
            "ROWS": _ROWS,
            "BLOCK_R": RANKS,
            "MAX_ADAPTERS": tables.max_adapters,
            "MAX_BLOCKS": tables.blocks.shape[1],
            "META_PARTS": tables.meta.shape[2],
            "SLICES": geometry.slices,
            "SLICE_TILES": geometry.slice_tiles,
            "TILE": geometry.tile_bytes // geometry.element_size,
            "PRECISION": "ieee" if pool.dtype == torch.float32 else "tf32",
            **overlap(pool.device),
        }

    def add_to(self, y: Tensor, x: Tensor, expert: int, rows: Tensor, *, down: bool) -> None:
        raise AssertionError("choices are sorted")

    def add_sorted(self, y: Tensor, x: Tensor, chosen: SortedChoices, *, down: bool) -> None:
        target, places = self._targets[down], len(x)
        parts = target.parts
        fixed = self._fixed | {"PARTS": len(parts), "TOP_K": chosen.top_k, "HEIGHT": chosen.height}
        ranks = fixed["RANKS"]
        sums = torch.empty(places, len(parts) * ranks, dtype=torch.float32, device=x.device)
        adapters = self._batch.of(target).adapter
        tables = self._pool, self._tables.blocks, self._tables.meta, adapters, chosen.order, chosen.tiles
        numbers = self._pool.shape[1], self._first + 2 * chosen.begin + int(down)
        shares = len(chosen.tiles) * (chosen.height // _ROWS)
        expert_shrink_kernel[(shares, len(parts), ranks // RANKS)](
            x, *tables, sums, *numbers, K=parts[0].own_inputs, **fixed
        )
        size = parts[0].own_outputs
        expert_expand_kernel[(shares, len(parts), cdiv(size, _OUTPUTS))](
            sums, *tables, y, *numbers, N=size, BLOCK_N=_OUTPUTS, BY_CHOICE=down, **fixed
        )
