"""`RowAddition`: the addition to a product of one row, in the launch of that product's CUDA kernel."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from octavo.features.lora import kernels
from octavo.features.lora.kernels import Form
from octavo.features.lora.tables import Tables
from octavo.nn.ops.stored_row import Joined


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
        self._kept = pool, tables.blocks, meta, adapters
        self._sums = torch.zeros(form.parts * form.ranks, dtype=torch.float32, device=pool.device)
        self.counts = torch.zeros(2, dtype=torch.int32, device=pool.device)
        addresses = [tensor.data_ptr() for tensor in (*self._kept, self._sums, self.counts)]
        numbers = pool.shape[1], tables.blocks.shape[1], meta.shape[1], *[*sizes, 0][:2]
        given = torch.tensor([*addresses, *numbers], dtype=torch.int64, device=pool.device)
        self.joined = Joined(kernels.row_addition(form), given)
