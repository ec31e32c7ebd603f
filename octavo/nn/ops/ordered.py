"""Matrix products on a GPU whose bits do not depend on the number of rows.

The matrix units add up products of 16 inputs to an accumulator. Kernels that pass once through all inputs with one
accumulator give the same bits, whatever their tiles, also those of the library; kernels that divide the inputs do not.
So the fastest algorithm is chosen among those of the library that give the bits of `triton_ordered.py` for random rows.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from octavo.nn.ops import few_rows
from octavo.nn.ops.cublaslt import Library, Product, aligned, library
from octavo.nn.ops.products import Like, Products, ProductShape, stored_choices, tried_for
from octavo.nn.ops.triton_ordered import ordered_product

log = logging.getLogger(__name__)

_TRIES = 8


class OrderedProducts(Products):
    """The chosen algorithm of each shape. There is one object per process, for its only GPU."""

    def __init__(self, lib: Library, path: Path) -> None:
        super().__init__(lib, path)
        self._few: dict[tuple[int, ...], bool] = {}
        self._first: dict[ProductShape, bytes | None] = {}

    def takes_few(self, weight: Tensor) -> bool:
        """Return whether `few_rows.few_product` gives the bits of `ordered_product` with such a matrix. That is
        tried at the first call which is not recorded."""
        shape = tuple(weight.shape)
        if shape not in self._few:
            if torch.cuda.is_current_stream_capturing():
                return False
            x = torch.randn(few_rows.MAX_ROWS, shape[1], dtype=weight.dtype, device=weight.device)
            same = torch.equal(few_rows.few_product(x, weight), ordered_product(x, weight, weight.dtype))
            self._few[shape] = same
        return self._few[shape]

    def run_ordered(self, x: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor | None:
        """Return x [M, K] @ weight [N, K]^T by the chosen algorithm, or one that is found now, unless steps are
        recorded; None if there is none."""
        found = self.run(x, weight, dtype)
        if found is None and aligned(x, weight) and not torch.cuda.is_current_stream_capturing():
            self._find((x.shape[0], *weight.shape, weight.dtype, dtype), weight)
            found = self.run(x, weight, dtype)
        return found

    def _find(self, shape: ProductShape, weight: Tensor) -> None:
        """Choose the library's first algorithm that gives the right bits, without measuring. It is tried for a multiple
        of the rows of a tile, and used for all numbers of rows that take as many tiles."""
        whole: ProductShape = (tried_for(shape[0]), *shape[1:])
        if whole not in self._first:
            self._first[whole] = self._first_right(whole, weight)
        algorithm = self._first[whole]
        product = Product(self._lib, shape[3], shape[4], *shape[:3])
        if algorithm is not None and product.takes(algorithm):
            self._chosen[shape] = product, algorithm

    def _first_right(self, shape: ProductShape, weight: Tensor) -> bytes | None:
        product = Product(self._lib, shape[3], shape[4], *shape[:3])
        out = torch.empty(shape[0], shape[1], dtype=shape[4], device=weight.device)
        return next((one for one in product.algorithms(_TRIES) if self._takes(product, one, shape, weight, out)), None)

    def _candidates(self, product: Product, shape: ProductShape, weight: Tensor, out: Tensor) -> list[bytes]:
        every = product.algorithms(_TRIES)
        return [one for one in every if self._takes(product, one, shape, weight, out)]

    def _takes(self, product: Product, algorithm: bytes, shape: ProductShape, weight: Tensor, out: Tensor) -> bool:
        """Return whether the algorithm gives the bits of `ordered_product`."""
        x = torch.randn(shape[0], shape[2], dtype=weight.dtype, device=weight.device)
        product.into(out, x, weight, algorithm)
        return torch.equal(out, ordered_product(x, weight, out.dtype))


@functools.cache
def products() -> OrderedProducts | None:
    """Return this process's products, or None if the library can't be used."""
    lib = library() if torch.cuda.is_available() else None
    return None if lib is None else OrderedProducts(lib, stored_choices(lib, "ordered"))


def choose(groups: Sequence[Like], rows: Iterable[int], wait: Callable[[], None]) -> None:
    """Choose algorithms for groups of like matrices and all these numbers of rows.

    Args:
        wait: waits until Octavo's own kernels are compiled; called once.
    """
    wait()
    owner = products()
    if owner is None:
        return
    began = time.perf_counter()
    counts = list(rows)
    for like in groups:
        owner.choose(like, counts)
        weight = like.weights[0]
        x = torch.randn(few_rows.MAX_ROWS, weight.shape[1], dtype=weight.dtype, device=weight.device)
        for count in counts:
            if count <= len(x):  # the first call finds and loads the kernel
                linear(x[:count], weight, like.dtype)
    owner.save()
    log.info(
        "chose matrix products with one order of sums for %d shapes in %.1f s, %d measured",
        *(len(groups) * len(counts), time.perf_counter() - began, owner.tried),
    )


def linear(x: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Return x [M, K] @ weight [N, K]^T, rounded once to `dtype`; a contiguous weight of a 16-bit dtype."""
    x = x.contiguous()
    owner = products() if x.is_cuda and x.shape[0] else None
    if owner is None:
        return ordered_product(x, weight, dtype)
    if dtype == x.dtype and few_rows.pays(x.shape[0], weight.shape[0]) and owner.takes_few(weight):
        return few_rows.few_product(x, weight)
    found = owner.run_ordered(x, weight, dtype)
    return ordered_product(x, weight, dtype) if found is None else found
