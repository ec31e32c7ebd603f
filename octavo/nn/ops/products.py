"""Matrix products on a GPU, by the library's algorithm that was measured to be fastest for a shape.

Results are stored in Octavo's cache folder, by device and library, so that nothing is measured twice.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F
from triton.errors import TritonError

from octavo.hub.cache import kernel_dir
from octavo.nn.ops import few_rows, gated_tiles, row16, triton_norm
from octavo.nn.ops.activation import silu_mul
from octavo.nn.ops.cublaslt import Library, Product, algorithm_of, aligned, library
from octavo.nn.ops.gated_tiles import GatedTiles
from octavo.nn.ops.race import Multiply, Track
from octavo.nn.ops.ring_rows import RingRows, Usual

log = logging.getLogger(__name__)

_TRIES = 4
_ROUNDS = 2
_FEW_ROWS = 256
_BONUS = 0.98
_ROUNDED = 0.02
_MOST_HALVED = 512
"""Most rows for which a product in halves is tried; with more, launches fill the GPU anyway."""
_EVEN = 256
"""If this divides the number of inputs, both halves are aligned as the library requires."""
_STEP = 64
"""Rows of a tile. Above `_FEW_ROWS`, the best algorithm for a multiple of it is also used for smaller numbers of
rows."""

ProductShape = tuple[int, int, int, torch.dtype, torch.dtype]
"""Rows, outputs, inputs; dtypes of the factors and of the product."""


@dataclass(frozen=True, slots=True)
class Like:
    """Matrices of one shape [N, K]; several, because a single small one would stay in the GPU's cache.

    Attributes:
        dtype: of the product.
        added: the product is also added to a residual stream, which is normalized next.
        gated: the product's halves are a gate and its operand.
    """

    weights: Sequence[Tensor]
    dtype: torch.dtype
    added: bool = False
    gated: bool = False


class Products:
    """The chosen algorithm of each shape. There is one object per process, for its only GPU.

    Attributes:
        tried: number of shapes that were measured, not found on disk.
        ring: the products of few rows for which Octavo's own kernel was chosen.
        tiles: the gated products of some hundred rows, likewise.
    """

    def __init__(self, lib: Library, path: Path) -> None:
        self._lib = lib
        self._path = path
        self._chosen: dict[ProductShape, tuple[Product, bytes]] = {}
        self._halved: dict[ProductShape, tuple[Product, bytes]] = {}
        self._known: dict[str, str] = _read(path)
        self._track = Track()
        self.tried = 0
        self.ring = RingRows(self._known, self._better)
        self.tiles = GatedTiles(self._known, self._better)

    def run(self, x: Tensor, weight: Tensor, dtype: torch.dtype, add_to: Tensor | None = None) -> Tensor | None:
        """Return x [M, K] @ weight [N, K]^T, or add it to `add_to` [M, N] in place; None if no algorithm was chosen."""
        rows, inputs = x.shape
        found = self._chosen.get((rows, weight.shape[0], inputs, x.dtype, dtype))
        if found is None or not aligned(x, weight, *([] if add_to is None else [add_to])):
            return None
        out = torch.empty(rows, weight.shape[0], dtype=dtype, device=x.device) if add_to is None else add_to
        product, algorithm = found
        product.into(out, x, weight, algorithm, add=add_to is not None)
        return out

    def halves(self, x: Tensor, weight: Tensor) -> Tensor | None:
        """Return [2, M, N]: the products over the first and the second half of the inputs; None if not chosen."""
        rows, inputs = x.shape
        outputs = weight.shape[0]
        found = self._halved.get((rows, outputs, inputs, x.dtype, weight.dtype))
        if found is None or not aligned(x, weight):
            return None
        out = torch.empty(2, rows, outputs, dtype=weight.dtype, device=x.device)
        product, algorithm = found
        product.into(out, x, weight, algorithm)
        return out

    @property
    def num_halved(self) -> int:
        """The number of shapes computed in halves."""
        return len(self._halved)

    def choose(self, like: Like, rows: Iterable[int]) -> None:
        """Choose among the library's algorithms for these numbers of rows, and run the chosen ones once to load
        them."""
        for count in _tried_first(like, rows):
            self._choose_one(count, like)

    def choose_halves(self, like: Like, rows: Iterable[int]) -> None:
        """For shapes with a chosen algorithm, choose whether they are computed in halves, which the next norm adds."""
        weight = like.weights[0]
        outputs, inputs = weight.shape
        if not (like.added and like.dtype == weight.dtype and inputs % _EVEN == 0):
            return
        for count in _tried_first(like, rows):
            shape = (count, outputs, inputs, weight.dtype, like.dtype)
            if shape in self._chosen and count <= _MOST_HALVED:
                x = torch.randn(count, inputs, dtype=weight.dtype, device=weight.device)
                self._choose_halves(shape, x, like)

    def choose_ring(self, like: Like, usual: Usual) -> None:
        """Choose whether Octavo's kernel multiplies few rows; call it when all else is chosen."""
        self.tried += self.ring.choose(like.weights, like.dtype, usual, gated=like.gated, added=like.added)

    def choose_tiles(self, like: Like, rows: Iterable[int]) -> None:
        """Choose whether Octavo's kernel multiplies and gates some hundred rows; call it when all else is chosen."""
        if like.gated:
            self.tried += self.tiles.choose(like.weights, rows, gated)

    def _choose_one(self, count: int, like: Like) -> None:
        weights, dtype = like.weights, like.dtype
        outputs, inputs = weights[0].shape
        kind = weights[0].dtype
        product = Product(self._lib, kind, dtype, count, outputs, inputs)
        x = torch.randn(count, inputs, dtype=kind, device=weights[0].device)
        own, next_to_it = (_name((rows, outputs, inputs, kind, dtype)) for rows in (count, tried_for(count)))
        known = (algorithm_of(self._known.get(name, "")) for name in (own, next_to_it))
        algorithm = next((one for one in known if one is not None and product.takes(one)), None)
        shape = (count, outputs, inputs, kind, dtype)
        if algorithm is None:
            room = torch.empty(count, outputs, dtype=dtype, device=x.device)
            algorithm = self._fastest(product, shape, x, weights, room)
            if algorithm is None:
                return
            self._known[own] = algorithm.hex()
            self.tried += 1
        self._chosen[shape] = (product, algorithm)
        out = self.run(x, weights[0], dtype)
        if like.added:
            self.run(x, weights[0], dtype, add_to=out)

    def _choose_halves(self, shape: ProductShape, x: Tensor, like: Like) -> None:
        """Choose whether a product in halves, summed by the norm, is faster than one that adds to the stream itself."""
        rows, outputs, inputs, kind, dtype = shape
        product = Product(self._lib, kind, dtype, rows, outputs, inputs, parts=2)
        name = self._name_of_halves(shape)
        if name not in self._known:
            self._known[name] = self._fastest_halves(shape, product, x, like).hex()
            self.tried += 1
        algorithm = algorithm_of(self._known[name])
        if algorithm is not None and product.takes(algorithm):
            self._halved[shape] = (product, algorithm)
            self.halves(x, like.weights[0])

    def _fastest_halves(self, shape: ProductShape, product: Product, x: Tensor, like: Like) -> bytes:
        """Return the algorithm, or b"" if it is not faster together with the following norm."""
        rows, outputs, *_ = shape
        stream = torch.zeros(rows, outputs, dtype=like.dtype, device=x.device)
        parts = torch.empty(2, rows, outputs, dtype=like.dtype, device=x.device)
        algorithm = self._fastest(product, shape, x, like.weights, parts)
        if algorithm is None:
            return b""
        whole, chosen = self._chosen[shape]
        norm = torch.ones(outputs, dtype=like.dtype, device=x.device)

        def at_once(weight: Tensor) -> None:
            whole.into(stream, x, weight, chosen, add=True)
            triton_norm.rms_norm(stream, norm, 1e-5)

        def in_halves(weight: Tensor) -> None:
            product.into(parts, x, weight, algorithm)
            triton_norm.sum_rms_norm(parts, stream, norm, 1e-5)

        return algorithm if self._pays(in_halves, at_once, like.weights, rows) else b""

    def _better(self, other: Multiply, usual: Multiply, weights: Sequence[Tensor], rows: int) -> bool:
        """Return whether `other` gives the same result, and is clearly faster."""
        return _same(other, usual, weights[0]) and self._pays(other, usual, weights, rows)

    def _pays(
        self,
        other: Callable[[Tensor], object],
        usual: Callable[[Tensor], object],
        weights: Sequence[Tensor],
        rows: int,
    ) -> bool:
        """Return whether `other` is clearly faster."""
        for each in (usual, other):
            each(weights[0])  # compiles it
        before, after = self._track.race((usual, other), weights, rows, _ROUNDS + 1)
        return after < _BONUS * before

    def _name_of_halves(self, shape: ProductShape) -> str:
        """Return the key of a choice on disk."""
        own, next_to_it = (f"{_name((rows, *shape[1:]))}-halves" for rows in (shape[0], tried_for(shape[0])))
        return next_to_it if own not in self._known and next_to_it in self._known else own

    def known(self) -> dict[str, str]:
        """Return all choices, of any matrices: key on disk -> choice."""
        return dict(self._known)

    def adopt(self, known: Mapping[str, str]) -> None:
        """Take over the choices of an equal device."""
        self._known.update(known)

    def save(self) -> None:
        """Write new results, if any. If the folder can't be written, the next start measures again."""
        if not self.tried:
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            part = self._path.with_suffix(f".{os.getpid()}")
            every = _read(self._path) | self._known  # another rank or engine may have written since
            part.write_text(json.dumps(every), encoding="utf-8")
            part.replace(self._path)
        except OSError as error:
            log.warning("failed to write the chosen matrix products to %s: %s", self._path, error)

    def _candidates(self, product: Product, shape: ProductShape, weight: Tensor, out: Tensor) -> list[bytes]:
        """Return the algorithms to choose from, in the order of the library's heuristic."""
        return product.algorithms(_TRIES)

    def _fastest(
        self, product: Product, shape: ProductShape, x: Tensor, weights: Sequence[Tensor], out: Tensor
    ) -> bytes | None:
        algorithms = self._candidates(product, shape, weights[0], out)
        runs = [functools.partial(product.into, out, x, algorithm=algorithm) for algorithm in algorithms]
        for run in runs:
            run(weights[0])  # loads it
        times = self._track.race(runs, weights, x.shape[0], _ROUNDS)
        # Keep the library's first choice unless another algorithm is clearly faster.
        times[:1] = [first * _BONUS for first in times[:1]]
        return min(zip(times, algorithms, strict=True))[1] if times else None


@functools.cache
def products() -> Products | None:
    """Return this process's products, or None if the library can't be used."""
    lib = library() if torch.cuda.is_available() else None
    return None if lib is None else Products(lib, stored_choices(lib))


def stored_choices(lib: Library, kind: str = "") -> Path:
    """Return the file with the choices for this device and library."""
    chip = torch.cuda.get_device_name().replace(" ", "-").replace("/", "-")
    return kernel_dir() / "products" / f"{chip}-{lib.version}{kind and '-'}{kind}.json"


def choose(groups: Sequence[Like], rows: Sequence[int], wait: Callable[[], None]) -> None:
    """Choose algorithms for groups of like matrices and all these numbers of rows.

    Args:
        wait: waits until Octavo's own kernels are compiled; called after the library's were measured.
    """
    owner = products()
    narrow = [like for like in groups if like.weights[0].dtype.itemsize == 2]
    if owner is None or not narrow:
        wait()
        return
    began = time.perf_counter()
    for like in narrow:
        owner.ring.begin(like.weights[0], like.dtype, gated=like.gated, added=like.added)
        if like.gated:
            owner.tiles.begin(like.weights[0], rows)
    for like in narrow:
        owner.choose(like, rows)
    middle = time.perf_counter()
    wait()
    again = time.perf_counter()
    for like in narrow:
        owner.choose_halves(like, rows)
    for like in narrow:
        owner.choose_ring(like, sys.modules[__name__])
    for like in narrow:
        owner.choose_tiles(like, rows)
    owner.save()
    log.info(
        "chose matrix products for %d shapes in %.1f s, %d measured; %d in halves",
        len(groups) * len(rows),
        time.perf_counter() - again + middle - began,
        owner.tried,
        owner.num_halved,
    )


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype | None = None) -> Tensor:
    """Return x @ weight^T + bias: [..., K] to [..., N], rounded once, to `dtype` if given."""
    wanted = dtype or x.dtype
    if x.is_cuda and x.dim() == 2 and bias is None and x.dtype.itemsize == 2:
        if x.is_contiguous() and _takes_ring(x, weight, wanted):
            return row16.rows_product(x, weight, dtype=wanted)
        if wanted == x.dtype and x.is_contiguous() and few_rows.pays(x.shape[0], weight.shape[0]):
            return few_rows.few_product(x, weight)
        owner = products()
        out = None if owner is None else owner.run(x, weight, wanted)
        if out is not None:
            return out
        if wanted != x.dtype:
            return torch.mm(x, weight.t(), out_dtype=wanted)
    return F.linear(x, weight, bias).to(wanted)


def add_linear(stream: Tensor, x: Tensor, weight: Tensor) -> None:
    """Add x [M, K] @ weight [N, K]^T to stream [M, N], in place and rounded once; contiguous tensors of one dtype."""
    if x.is_cuda and x.dtype.itemsize == 2:
        if _takes_ring(x, weight, stream.dtype, added=True):
            row16.rows_product(x, weight, add_to=stream)
            return
        if few_rows.pays(x.shape[0], weight.shape[0]):
            few_rows.few_product(x, weight, add_to=stream)
            return
        owner = products()
        if owner is not None and owner.run(x, weight, x.dtype, add_to=stream) is not None:
            return
    torch.addmm(stream, x, weight.t(), out=stream)


def halves(x: Tensor, weight: Tensor) -> Tensor | None:
    """Return [2, M, N]: x [M, K] @ weight [N, K]^T over each half of the inputs, both rounded; contiguous tensors of
    one dtype. None unless summing them in the norm of a residual stream was measured to be faster than `add_linear`."""
    owner = products() if x.is_cuda else None
    if owner is None or owner.ring.takes(x, weight, x.dtype, gated=False, added=True):
        return None
    return owner.halves(x, weight)


def gated(x: Tensor, weight: Tensor) -> Tensor:
    """Return silu(x @ gate^T) * (x @ up^T): [M, K] to [M, N], for weight [2N, K]; contiguous tensors of one dtype."""
    if _takes_ring(x, weight, x.dtype, gated=True):
        return row16.rows_product(x, weight, gated=True)
    if takes_tiles(x, weight):
        return gated_tiles.product(x, weight)
    return silu_mul(linear(x, weight, None))


def takes_tiles(x: Tensor, weight: Tensor) -> bool:
    """Return whether `gated_tiles.product` was chosen for this product."""
    owner = products() if x.is_cuda else None
    return owner is not None and owner.tiles.takes(x, weight)


def _takes_ring(x: Tensor, weight: Tensor, result: torch.dtype, *, gated: bool = False, added: bool = False) -> bool:
    owner = products() if x.is_cuda else None
    return owner is not None and owner.ring.takes(x, weight, result, gated=gated, added=added)


def _same(other: Callable[[Tensor], Tensor], usual: Callable[[Tensor], Tensor], weight: Tensor) -> bool:
    """Return whether `other` runs on this GPU, with this Triton, and gives the same result except for rounding."""
    expected = usual(weight).float()
    try:
        off = (other(weight).float() - expected).norm() / expected.norm()
    except (RuntimeError, TritonError) as error:
        log.warning("skipped a kernel that can't be used here: %s", error)
        return False
    return bool(off < _ROUNDED)


def _tried_first(like: Like, rows: Iterable[int]) -> list[int]:
    """Return the numbers of rows that the library multiplies, first those whose algorithm is also used for others."""
    weight = like.weights[0]
    ours = like.dtype == weight.dtype
    counts = sorted(rows, key=lambda rows: (tried_for(rows) != rows, rows))
    return [count for count in counts if not (ours and few_rows.pays(count, weight.shape[0]))]


def tried_for(rows: int) -> int:
    """Return the number of rows whose algorithm is used for `rows`."""
    return rows if rows <= _FEW_ROWS else -(-rows // _STEP) * _STEP


def _name(shape: ProductShape) -> str:
    return "-".join(str(part).removeprefix("torch.") for part in shape)


def _read(path: Path) -> dict[str, str]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
