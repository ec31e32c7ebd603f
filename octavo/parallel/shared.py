"""`SharedMemory`: collectives of ranks whose CPUs share memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from octavo.native.bindings import Dtype
from octavo.native.exchange import Exchange

_DTYPES = {torch.float32: Dtype.FLOAT, torch.bfloat16: Dtype.BFLOAT}


class SharedMemory:
    """`Collectives` through an `Exchange`, which native programs use, too.

    Attributes:
        exchange: also takes part in the sums of native programs.
    """

    def __init__(self, exchange: Exchange) -> None:
        self.exchange = exchange

    def all_reduce(self, x: Tensor) -> Tensor:
        if x.dtype not in _DTYPES:
            raise TypeError(f"ranks add up float32 and bfloat16, not {x.dtype}")
        x = x.contiguous()
        self.exchange.all_reduce(x.data_ptr(), x.numel(), _DTYPES[x.dtype])
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        x, size = x.contiguous(), self.exchange.size
        parts = x.new_empty(size, *x.shape)
        self.exchange.all_gather(x.data_ptr(), parts.data_ptr(), x.nbytes)
        return parts

    def all_to_all(self, x: Tensor, sent: Sequence[int], received: Sequence[int]) -> list[Tensor]:
        """See `ExchangingRows`. All ranks receive all rows, which costs little in memory that they share."""
        counts = [one.tolist() for one in self.all_gather(torch.tensor(sent))]
        padded = x.new_zeros(max(map(sum, counts)), *x.shape[1:])
        padded[: len(x)] = x
        own, rows = self.exchange.rank, []
        for all_rows, count in zip(self.all_gather(padded), counts, strict=True):
            rows.append(all_rows[: sum(count)].split(count)[own])
        assert [len(one) for one in rows] == list(received)
        return rows
