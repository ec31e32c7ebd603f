"""Tables of 16 numbers that codes of 4 bits stand for, as the kernels of a GPU find them."""

from __future__ import annotations

import torch
from torch import Tensor

PLANES = (torch.bfloat16, torch.float16)
"""Dtypes for which bytes of numbers are stored."""


def book_of(numbers: Tensor, device: torch.device) -> Tensor:
    """Return a table's `book`, [3, 4] int64: the numbers' bytes in bfloat16 and in float16, the low ones before the
    high ones, and the numbers in float16."""
    planes = [numbers.to(dtype).view(torch.uint8).view(2, 8, 2).permute(2, 0, 1) for dtype in PLANES]
    rows = [*planes, numbers.half().view(torch.uint8)]
    return torch.stack([row.reshape(-1).view(torch.int64) for row in rows]).to(device)


def planes_in(book: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the bytes of a book's numbers in one of `PLANES`, for kernels that permute them: [4] int64."""
    return book.select(0, PLANES.index(dtype))


def numbers_in(book: Tensor) -> Tensor:
    """Return a book's numbers, [16] float16."""
    return book.select(0, 2).view(torch.float16)
