"""`RowAddition`: the addition to a product of one row, in the launch of that product's CUDA kernel."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import Structure, c_int, c_void_p

import torch
from torch import Tensor

from octavo.features.lora import kernels
from octavo.features.lora.kernels import Form
from octavo.features.lora.tables import Tables
from octavo.nn.ops.nvrtc import address
from octavo.nn.ops.stored_row import Joined


class Given(Structure):
    """The struct of this name in `cuda/row_addition.cuh`."""

    _fields_ = (
        *((name, c_void_p) for name in ("pool", "blocks", "meta", "adapter", "sums", "counts")),
        *((name, c_int) for name in ("num_blocks", "max_blocks", "meta_parts")),
        ("sizes", c_int * 2),
    )


class RowAddition:
    """What the kernel reads about a target and the adapter of the step's first row.

    Attributes:
        joined: for `stored_row.product`; its outputs are those of all parts in turn, or the halves of a gate.
        counts: [2] int32; the launch counts blocks in it, and leaves zeros.
    """

    def __init__(
        self, pool: Tensor, tables: Tables, meta: Tensor, adapters: Tensor, sizes: Sequence[int], form: Form
    ) -> None:
        """
        Args:
            meta: of the target; see `Tables`.
            adapters: [max_rows] int32, those of the step's rows.
            sizes: outputs of the parts.
        """
        self.counts = torch.zeros(2, dtype=torch.int32, device=pool.device)
        sums = torch.zeros(form.parts * form.ranks, dtype=torch.float32, device=pool.device)
        self._kept = pool, tables.blocks, meta, adapters, sums
        given = Given(
            *map(address, (*self._kept, self.counts)),
            pool.shape[1],
            tables.blocks.shape[1],
            meta.shape[1],
            (c_int * 2)(*[*sizes, 0][:2]),
        )
        self.joined = Joined(kernels.row_addition(form), given)
