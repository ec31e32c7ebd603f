"""What the launches of both kinds of grouped products have in common: plain and packed matrices of experts."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from octavo.device.launch_sizes import cdiv
from octavo.nn.experts_spec import ExpertsForm


class Tiles(Protocol):
    """How programs divide a product; see `Tiling` in `expert_products.py`."""

    @property
    def height(self) -> int: ...
    @property
    def width(self) -> int: ...
    @property
    def depth(self) -> int: ...
    @property
    def side_by_side(self) -> int: ...
    @property
    def turned(self) -> bool: ...
    @property
    def copies(self) -> bool: ...
    @property
    def copies_rows(self) -> bool: ...
    @property
    def warps(self) -> int: ...
    @property
    def stages(self) -> int: ...


def matrix_argument(w: Tensor, outputs: int, tiling: Tiles) -> Tensor | TensorDescriptor:
    """Return the kernels' argument `w`, matrices [E, parts * outputs, length]; tiles of it if they are copied."""
    if not tiling.copies:
        return w
    count, rows, length = w.shape
    parts = rows // outputs
    shape, strides = [count * parts, outputs, length], [outputs * length, length, 1]
    return TensorDescriptor(w, shape, strides, [parts, tiling.width, tiling.depth])


def rows_argument(x: Tensor, height: int, tiling: Tiles) -> Tensor | TensorDescriptor:
    """Return the kernels' argument `x` [R, K]; tiles of it, of this height, if they are copied."""
    if not tiling.copies_rows:
        return x
    return TensorDescriptor(x, [*x.shape], [x.shape[1], 1], [height, tiling.depth])


def programs(tiles: Tensor, outputs: int, tiling: Tiles) -> tuple[int]:
    """Return the number of programs of a product."""
    columns = cdiv(outputs, tiling.width)
    return (cdiv(len(tiles), tiling.side_by_side) * tiling.side_by_side * columns,)


def constants(tiling: Tiles, form: ExpertsForm, *, first: bool) -> dict[str, Any]:
    """Return the kernels' arguments that say how a product is divided and what follows it."""
    return {
        "HEIGHT": tiling.height,
        "WIDTH": tiling.width,
        "DEPTH": tiling.depth,
        "SIDE_BY_SIDE": tiling.side_by_side,
        "FIRST": first,
        "GATED": first and form.gated,
        "WEIGHTED": first and form.on_inputs,
        "TURNED": tiling.turned,
        "COPIES": tiling.copies,
        "COPIES_ROWS": tiling.copies_rows,
        "num_warps": tiling.warps,
        "num_stages": tiling.stages,
    }
