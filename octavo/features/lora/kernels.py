"""The CUDA kernels of low-rank additions: `shrink.cu` and `expand.cu`, and `row_addition.cuh` for one row."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from ctypes import c_int
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from octavo.features.lora.layout import Geometry, Target
from octavo.features.lora.tables import RANKS, TILE_ROWS
from octavo.nn.ops import nvrtc
from octavo.nn.ops.nvrtc import Argument, Kernel, address
from octavo.nn.ops.stored_row import JoinedCode

WARPS = 8
"""Of a block."""
BLOCKS = 2
"""Of a launch for several rows, on each multiprocessor."""
DEPTH = 4
"""Times that a warp copies weights before it waits for the first ones, in the second half for several rows."""
OUTPUTS = 64
"""Of all parts, that a warp takes at a time in the second half for several rows."""
_MATRIX_INPUTS = 32
"""Inputs that a warp multiplies in one step."""
MAX_PARTS = 3
"""Projections of one product to which a launch adds."""
_LANE = 8
"""Elements that a lane loads at once."""

Variant = tuple[tuple[str, int], ...]
"""Macros that differ between kernels of one source."""


class Form(NamedTuple):
    """What kernels are compiled for, whatever the sizes of a layer.

    Attributes:
        dtype: of adapters and products.
        slices, slice_tiles, tile: of the adapters' `Geometry`; a tile in bytes.
        parts: of the target.
        ranks: room for those of a part, a multiple of `RANKS`.
    """

    dtype: torch.dtype
    slices: int
    slice_tiles: int
    tile: int
    parts: int
    ranks: int

    @classmethod
    def of(cls, dtype: torch.dtype, geometry: Geometry, parts: int, max_rank: int) -> Form:
        sizes = geometry.slices, geometry.slice_tiles, geometry.tile_bytes
        return cls(dtype, *sizes, parts, max(RANKS, geometry.stride(max_rank)))

    def held_bytes(self, *, gates: bool) -> int:
        """Return the bytes of shared memory of a block for sums and weights; see `cuda/expand.cu`."""
        sums = (2 if gates else 1) * self.ranks * TILE_ROWS
        return WARPS * (sums + DEPTH * OUTPUTS * RANKS) * self.dtype.itemsize


def serves(target: Target, geometry: Geometry, max_rank: int) -> bool:
    """Return whether the kernels can add to a target."""
    size, tile = geometry.element_size, geometry.tile_bytes
    fits = tile >= max(_MATRIX_INPUTS, geometry.stride(max_rank)) * size
    return fits and all(part.own_inputs % _LANE == 0 and part.own_outputs % _LANE == 0 for part in target.parts)


def shrink(form: Form, *, x_float: bool = False) -> Kernel:
    return _kernel("shrink", form, (("X_FLOAT", int(x_float)),))


def expand(form: Form, *, gates: bool = False, alone: bool = False) -> Kernel:
    return _kernel("expand", form, (("GATES", int(gates)), ("ALONE", int(alone))))


def compile_ahead(form: Form, *, alone: bool = False) -> None:
    """Compile kernels in the background.

    Args:
        alone: the form of `expand` of this name, too.
    """
    variants: dict[str, list[Variant]] = {"shrink": [(("X_FLOAT", 0),)], "expand": [(("GATES", 0), ("ALONE", 0))]}
    if form.parts == 2:
        variants["expand"].append((("GATES", 1), ("ALONE", 0)))
    if alone:
        variants["expand"].append((("GATES", 0), ("ALONE", 1)))
    for name, some in variants.items():
        for variant in some:
            nvrtc.compile_ahead(*_source_of(name, form, variant))


def launch(kernel: Kernel, blocks: int, tensors: Sequence[Tensor], integers: Sequence[int]) -> None:
    """Launch a kernel with arguments in this order."""
    given: list[Argument] = [*map(address, tensors), *map(c_int, integers)]
    kernel.launch((blocks, 1, 1), given)


@functools.cache
def _kernel(name: str, form: Form, variant: Variant) -> Kernel:
    held = form.held_bytes(gates=dict(variant)["GATES"] == 1) if name == "expand" else 0
    return Kernel(name, *_source_of(name, form, variant), 32 * WARPS, held)


def row_addition(form: Form) -> JoinedCode:
    """Return the addition to the product of one row, in that product's launch."""
    return JoinedCode(_text("places.cuh") + _text("row_addition.cuh"), tuple(_macros(form).items()))


def _source_of(name: str, form: Form, variant: Variant) -> tuple[str, dict[str, int]]:
    """Return source and macros."""
    macros = {"BITS": 8, "GROUP": 0, "MINIMA": 0, "HALF": int(form.dtype == torch.float16), "WARPS": WARPS}
    macros |= {"DEPTH": DEPTH} | _macros(form) | dict(variant)
    own = map(_text, ("places.cuh", "low_rank.cuh", f"{name}.cu"))
    return nvrtc.source_of("integers.cuh", "copies.cuh") + "".join(own), macros


def _macros(form: Form) -> dict[str, int]:
    own = {"FLOATS": int(form.dtype == torch.float32), "SLICES": form.slices, "SLICE_TILES": form.slice_tiles}
    return own | {"TILE": form.tile, "PARTS": form.parts, "RANKS": form.ranks}


@functools.cache
def _text(name: str) -> str:
    return (Path(__file__).parent / "cuda" / name).read_text(encoding="utf-8")
