"""Gated products of some hundred rows with a matrix of 16-bit numbers on a Hopper GPU, by the CUDA kernel
`cuda/gated_tiles.cu`, where it was measured to be faster than the library's product and a gate.

It saves the gate's launch, which reads and writes the product again, begins to copy weights while the previous launch
ends, and needs no counter of tiles, which the library's kernel clears in a launch of its own.
"""

from __future__ import annotations

import functools
import logging
import zlib
from collections.abc import Callable, Iterable, MutableMapping, Sequence
from ctypes import c_int
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from octavo.device.launch_sizes import cdiv
from octavo.nn.ops import nvrtc, wgmma
from octavo.nn.ops.activation import silu_mul
from octavo.nn.ops.nvrtc import Argument, Kernel, address
from octavo.nn.ops.race import Pays
from octavo.nn.ops.ring import multiprocessors

log = logging.getLogger(__name__)

HEIGHT = 128
"""Rows of a tile."""
FEWEST, MOST = 65, 512
"""Rows: fewer would leave half of a tile empty, and for more the library's larger tiles are better."""
_STEP = 64
"""Inputs of a stage."""
_ROW_BYTES = 128
_SHARED = 226 << 10
"""Of a block, without barriers."""
_ALIGNMENT = 1 << 10
_THREADS = 384
_SIDES = (64, 80, 96, 112, 128)
_ROUNDED = 0.02
"""Largest relative error."""
_STEP_COST, _TILE_COST = 64, 1500
"""What a step takes beside its outputs, of both sides, and what a tile takes beside its steps."""


class Form(NamedTuple):
    """What a kernel is compiled for.

    Attributes:
        side: outputs of a tile.
        tall: adjacent tiles of rows whose blocks copy weights for each other.
        dtype: of x, the matrix and the result.
        adds: something is added to the products before the gate.
    """

    side: int
    tall: int
    dtype: torch.dtype
    adds: bool = False

    @property
    def stage(self) -> int:
        return (HEIGHT + 2 * self.side) * _ROW_BYTES

    @property
    def stages(self) -> int:
        return (_SHARED - _ALIGNMENT) // self.stage


def runs(device: torch.device) -> bool:
    """Return whether a device is one that the kernel is made for."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)


def fits(weight: Tensor) -> bool:
    """Return whether the kernel supports a matrix [2N, K] on its device."""
    outputs, inputs = weight.shape
    return runs(weight.device) and weight.dtype.itemsize == 2 and inputs % _STEP == 0 and outputs % 16 == 0


def product(x: Tensor, weight: Tensor, added: tuple[Tensor, Tensor] | None = None) -> Tensor:
    """Return silu(x @ gate^T) * (x @ up^T), rounded once.

    Args:
        x: [M, K], contiguous.
        weight: [2N, K], contiguous, of x's dtype, which `fits`: gate and up. The launch before this one must not
            write it, since the first part is read before that has ended.
        added: what is added to both products before the gate, [M, 2N] of x's dtype; and [at least M] int32, negative
            for rows to which nothing is added.

    Returns:
        [M, N].
    """
    rows, inputs = x.shape
    outputs = weight.shape[0] // 2
    out = torch.empty(rows, outputs, dtype=x.dtype, device=x.device)
    side, tall = plan_of(rows, outputs, inputs, multiprocessors(x.device))
    clusters = min(_tiles(side, tall, rows, outputs), multiprocessors(x.device) // tall)
    values, adds = (out, out) if added is None else added
    given: list[Argument] = [nvrtc.tiles_of(weight, side, _STEP), nvrtc.tiles_of(x, HEIGHT, _STEP)]
    given += [*map(address, (out, values, adds)), *map(c_int, (rows, outputs, inputs))]
    _kernel(Form(side, tall, x.dtype, added is not None)).launch((clusters * tall, 1, 1), given)
    return out


@functools.cache
def plan_of(rows: int, outputs: int, inputs: int, blocks: int) -> tuple[int, int]:
    """Return the side and the tiles of rows of a cluster (see `Form`) that take the least time.

    Args:
        outputs: of the result.
        blocks: that run at once.
    """
    tall = 1 if rows <= HEIGHT else 2

    def cost(side: int) -> float:
        rounds = cdiv(_tiles(side, tall, rows, outputs), blocks // tall)
        return rounds * (inputs // _STEP * (2 * side + _STEP_COST) + _TILE_COST)

    return min(_SIDES, key=cost), tall


def _tiles(side: int, tall: int, rows: int, outputs: int) -> int:
    """Return the number of tiles that clusters take."""
    return cdiv(outputs, side) * cdiv(rows, HEIGHT * tall)


@functools.cache
def _kernel(form: Form) -> Kernel:
    source, macros = source_of(form)
    return Kernel("gated_tiles", source, macros, _THREADS, form.stages * form.stage + _ALIGNMENT, form.tall)


def source_of(form: Form) -> tuple[str, dict[str, int]]:
    """Return source and macros."""
    macros = {"BITS": 8, "GROUP": 0, "MINIMA": 0, "HALF": int(form.dtype == torch.float16), "ADDS": int(form.adds)}
    macros |= {"SIDE": form.side, "CLUSTER": form.tall, "STAGES": form.stages}
    before = nvrtc.source_of("barriers.cuh", "integers.cuh", "tile_ring.cuh", "cluster_tiles.cuh")
    before += wgmma.tile_source("multiply_tile", 2 * form.side, form.dtype)
    return before + nvrtc.source_of("gated_tiles.cu"), macros


class GatedTiles:
    """The shapes for which the kernel was chosen.

    Args:
        known: earlier choices, by name; gets new ones.
        pays: whether the kernel is to be used in place of another product.
    """

    def __init__(self, known: MutableMapping[str, str], pays: Pays) -> None:
        self._known = known
        self._pays = pays
        self._chosen: set[tuple[int, int, int, torch.dtype]] = set()

    def takes(self, x: Tensor, weight: Tensor) -> bool:
        """Return whether the kernel multiplies x [M, K] by a matrix [2N, K], both contiguous."""
        chosen = (x.shape[0], *weight.shape, weight.dtype) in self._chosen
        return chosen and x.dtype == weight.dtype and x.dim() == 2 and x.is_contiguous() and weight.is_contiguous()

    def begin(self, weight: Tensor, rows: Iterable[int]) -> None:
        """Compile the kernels for a matrix in the background."""
        for form in {form for count in self._tried(weight, rows) for form in self._forms(weight, count)}:
            nvrtc.compile_ahead(*source_of(form))

    def choose(self, weights: Sequence[Tensor], rows: Iterable[int], usual: Callable[[Tensor, Tensor], Tensor]) -> int:
        """Choose for like matrices [2N, K] and numbers of rows; return how many were measured."""
        tried = 0
        for count in self._tried(weights[0], rows):
            x = torch.randn(count, weights[0].shape[1], dtype=weights[0].dtype, device=weights[0].device)
            ours, theirs = functools.partial(product, x), functools.partial(usual, x)
            name = self._name(count, weights[0])
            if name not in self._known:
                pays = self._pays(ours, theirs, weights, count) and _adds(x, weights[0])
                self._known[name] = "tiles" if pays else ""
                tried += 1
            if self._known[name]:
                for form in self._forms(weights[0], count):
                    _kernel(form)  # loads it
                self._chosen.add((count, *weights[0].shape, weights[0].dtype))
        return tried

    def _tried(self, weight: Tensor, rows: Iterable[int]) -> list[int]:
        if not fits(weight):
            return []
        some = [count for count in rows if FEWEST <= count <= MOST]
        return [count for count in some if self._known.get(self._name(count, weight), "tiles")]

    @staticmethod
    def _forms(weight: Tensor, rows: int) -> list[Form]:
        outputs, inputs = weight.shape
        form = Form(*plan_of(rows, outputs // 2, inputs, multiprocessors(weight.device)), weight.dtype)
        return [form, form._replace(adds=True)]

    @classmethod
    def _name(cls, rows: int, weight: Tensor) -> str:
        """Return the name of a choice, which holds for this form of the kernel."""
        shape = (rows, *weight.shape, weight.dtype)
        source, macros = source_of(cls._forms(weight, rows)[0])
        version = zlib.crc32(f"{source}{macros}".encode())
        return "-".join([*(str(one).removeprefix("torch.") for one in shape), "gated-tiles", f"{version:08x}"])


def _adds(x: Tensor, weight: Tensor) -> bool:
    """Return whether an addition is right, here of the product itself, to every other row."""
    both = F.linear(x, weight)
    rows = torch.arange(len(x), device=x.device, dtype=torch.int32) % 2 - 1
    try:
        got = product(x, weight, (both, rows)).float()
    except RuntimeError as error:
        log.warning("skipped a kernel that can't be used here: %s", error)
        return False
    expected = silu_mul(both * (rows + 2)[:, None]).float()
    return bool((got - expected).norm() < _ROUNDED * expected.norm())
