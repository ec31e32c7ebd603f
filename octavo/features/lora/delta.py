"""Adapters in torch, exactly and slowly: the reference of the kernels, and what computes where there are none.

It also has what no kernel has: gains, saved modules and embeddings.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from octavo.device.transfer import Link
from octavo.features.lora.layout import Span, Target
from octavo.features.lora.tables import Assigned, Batch, Tables
from octavo.nn.delta import Addition, Delta
from octavo.nn.linear import Linear, Projection
from octavo.nn.shard import Cut
from octavo.worker.blocks import Blocks

D = TypeVar("D", bound=Delta)


class Weights:
    """Reads adapters' rows in the blocks of the KV cache.

    Args:
        dtype: of the elements.
    """

    def __init__(self, blocks: Blocks, tables: Tables, dtype: torch.dtype, link: Link) -> None:
        self.tables = tables
        self._blocks = blocks
        self._dtype = dtype
        self._link = link

    def rows(self, adapter: int, tile: int, count: int, elements: int) -> Tensor:
        """Return consecutive rows, [count, elements] float32, the first of which begins at a tile."""
        each = self.tables.geometry.row_tiles(elements)
        return self.at(adapter, tile + np.arange(count) * each, elements)

    def b(self, adapter: int, span: Span, outputs: int) -> Tensor:
        """Return a piece's B transposed, [rank, outputs] float32."""
        geometry = self.tables.geometry
        if not geometry.by_output:
            return self.rows(adapter, span.b, span.rank, outputs)
        stride = geometry.stride(span.rank)
        return self.rows(adapter, span.b, 1, outputs * stride).view(outputs, stride)[:, : span.rank].t()

    def at(self, adapter: int, tiles: NDArray[np.int64], elements: int) -> Tensor:
        """Return the rows that begin at these tiles, [len(tiles), elements] float32."""
        each = self.tables.geometry.row_tiles(elements)
        return self._gather(adapter, tiles[:, None] + np.arange(each), self._dtype)[:, :elements]

    def gain(self, adapter: int, tile: int, elements: int) -> Tensor:
        """Return the gains at a tile, [elements] float32."""
        each = -(-elements * torch.float32.itemsize // self.tables.geometry.tile_bytes)
        return self._gather(adapter, tile + np.arange(each)[None], torch.float32)[0, :elements]

    def _gather(self, adapter: int, tiles: NDArray[np.int64], dtype: torch.dtype) -> Tensor:
        """Return the tiles [n, k] of an adapter as [n, elements of k tiles] float32."""
        geometry = self.tables.geometry
        page, inner = np.divmod(tiles.ravel(), geometry.block_tiles)
        place, tile = np.divmod(inner, geometry.slice_tiles)
        block = np.asarray(self.tables.lists[adapter])[page]
        memory = self._blocks.memory
        cells = memory.view(*memory.shape[:2], geometry.slice_tiles, geometry.tile_bytes)
        found = cells[tuple(self._link.upload(index) for index in (place, block, tile))]
        return found.view(dtype).view(len(tiles), -1).float()


class Replaced:
    """The outputs of a head for which adapters have weights of their own: saved modules, and rows of single tokens.

    Args:
        bias: returns the layer's bias; None for none.
        cut: the rank's features of the head; None for all.
    """

    def __init__(
        self,
        index: int,
        target: Target,
        weights: Weights,
        batch: Batch,
        bias: Callable[[], Tensor | None],
        cut: Cut | None = None,
    ) -> None:
        self._index, self._part = index, target.parts[0]
        self._weights = weights
        self._rows = batch.of(target)
        self._bias = bias
        self._first = 0 if cut is None or cut.outputs is None else cut.outputs[0].start

    @property
    def added(self) -> int:
        """How many outputs the step's adapters add to the base's, at most."""
        spans = (self._weights.tables.layouts[adapter].spans.get((self._index, 0)) for adapter in self._rows.groups)
        ends = (max((span.rows, *(token + 1 for token in span.tokens))) for span in spans if span is not None)
        return max((end - self._part.own_outputs for end in ends), default=0)

    def put(self, y: Tensor, x: Tensor, finish: Callable[[Tensor], Tensor] = lambda values: values) -> None:
        """Replace these outputs in y [T, outputs] by those for x [T, in], in place.

        Args:
            finish: what is applied to outputs [n, m] float32 after the product.
        """
        self._put(y, x, finish, self._bias(), added=False)

    def put_added(self, y: Tensor, x: Tensor, finish: Callable[[Tensor], Tensor]) -> None:
        """Set the outputs that adapters add, in columns of y beyond the base's; likewise."""
        self._put(y, x, finish, None, added=True)

    def _put(
        self, y: Tensor, x: Tensor, finish: Callable[[Tensor], Tensor], bias: Tensor | None, *, added: bool
    ) -> None:
        size, inputs = self._part.own_outputs, self._part.own_inputs
        each = self._weights.tables.geometry.row_tiles(inputs)
        for adapter, rows in self._rows.groups.items():
            span = self._weights.tables.layouts[adapter].spans.get((self._index, 0))
            if span is None or span.rank:
                continue
            if span.whole >= 0:
                places = np.arange(size, span.rows) if added else np.arange(size)
                tiles = span.whole + places * each
            else:
                places = np.array(span.tokens) - self._first
                mine = places >= size if added else (places >= 0) & (places < size)
                places, tiles = places[mine], span.row + np.flatnonzero(mine) * each
            if len(places):
                index = torch.from_numpy(rows).to(x.device)
                outputs = torch.from_numpy(places).to(x.device)
                weight = self._weights.at(adapter, tiles, inputs)
                product = F.linear(x[index].float(), weight, None if bias is None else bias[outputs].float())
                y[index[:, None], outputs] = finish(product).to(y.dtype)


class TorchDelta(Delta):
    """The additions of all adapters to one layer."""

    def __init__(
        self, index: int, target: Target, layer: Projection, weights: Weights, batch: Batch, cut: Cut | None = None
    ) -> None:
        """
        Args:
            cut: the rank's features of a head; None for all.
        """
        self.target = target
        self.index = index
        self.layer = layer
        self.weights = weights
        self.batch = batch
        self.replaced = Replaced(index, target, weights, batch, self._bias, cut) if target.head else None

    def begin(self, x: Tensor) -> Addition:
        return _TorchAddition(self, x)

    def additions(self, x: Tensor) -> Iterator[tuple[Tensor, slice, Tensor]]:
        """Yield rows [n], outputs and the addition [n, outputs] float32 for x [T, in]."""
        tables = self.weights.tables
        for adapter, rows in self.batch.of(self.target).groups.items():
            spans = tables.layouts[adapter].spans
            parts = range(len(self.target.parts))
            found = [(part, spans[self.index, part]) for part in parts if (self.index, part) in spans]
            mine = [(part, span) for part, span in found if span.rank]
            if not mine:
                continue
            index = torch.from_numpy(rows).to(x.device)
            inputs = x.index_select(0, index)
            for part, span in mine:
                yield index, self._outputs(part), self._addition(adapter, part, span, inputs)

    def _addition(self, adapter: int, part: int, span: Span, x: Tensor) -> Tensor:
        one = self.target.parts[part]
        a = self.weights.rows(adapter, span.a, span.rank, one.own_inputs)
        b = self.weights.b(adapter, span, one.own_outputs)
        addition = F.linear(x.float(), a) @ b
        if span.gain < 0:
            return addition
        gain = self.weights.gain(adapter, span.gain, one.own_outputs)
        return gain * addition + (gain - 1) * self._product(x, part)

    def _product(self, x: Tensor, part: int) -> Tensor:
        """Return the base's product, without bias, [n, outputs] float32."""
        y = self.layer.scheme.wide(x).float()
        bias = self._bias()
        if bias is not None:
            y = y - bias.float()
        return y[:, self._outputs(part)]

    def _bias(self) -> Tensor | None:
        return getattr(self.layer.scheme, "bias", None)

    def _outputs(self, part: int) -> slice:
        sizes = self.layer.sizes if isinstance(self.layer, Linear) else [self.target.parts[0].own_outputs]
        start = sum(sizes[:part])
        return slice(start, start + sizes[part])


class _TorchAddition(Addition):
    """Computed when it is added."""

    def __init__(self, delta: TorchDelta, x: Tensor) -> None:
        self._delta = delta
        self._x = x

    def add_to(self, y: Tensor) -> None:
        for rows, outputs, addition in self._delta.additions(self._x):
            y[:, outputs].index_add_(0, rows, addition.to(y.dtype))
        if self._delta.replaced is not None:
            self._delta.replaced.put(y, self._x)


class LateDelta(Delta, Generic[D]):
    """The additions to a late layer, by an object for each of the two sets of rows that it may compute.

    Attributes:
        tokens: that for all rows.
    """

    def __init__(self, tokens: D, logits: D, batch: Batch) -> None:
        self.fused_rows = min(tokens.fused_rows, logits.fused_rows)
        self.tokens = tokens
        self._logits = logits
        self._batch = batch

    def begin(self, x: Tensor) -> Addition:
        return self._delta.begin(x)

    def fused(self, x: Tensor, weight: Tensor, **how: Any) -> Tensor:
        return self._delta.fused(x, weight, **how)

    @property
    def _delta(self) -> D:
        return self._logits if self._batch.chosen else self.tokens


def by_rows(target: Target, batch: Batch, make: Callable[[Assigned], Delta]) -> Delta:
    """Return the additions to a layer, made for the rows that it computes."""
    if target.late:
        return LateDelta(make(batch.tokens), make(batch.logits), batch)
    return make(batch.logits if target.head else batch.tokens)


class TorchEmbedding:
    """The additions of all adapters to the embedding of tokens.

    Args:
        scale: what the model multiplies embeddings with.
    """

    def __init__(self, index: int, target: Target, weights: Weights, batch: Batch, scale: float = 1.0) -> None:
        self._index = index
        self._part = target.parts[0]
        self._weights = weights
        self._batch = batch
        self._scale = scale

    def change(self, x: Tensor, ids: Tensor) -> Tensor:
        """Return the embeddings x [T, size] of tokens [T] as the rows' adapters have them."""
        for adapter, rows in self._batch.tokens.groups.items():
            span = self._weights.tables.layouts[adapter].spans.get((self._index, 0))
            if span is None:
                continue
            index = torch.from_numpy(rows).to(x.device)
            tokens = ids.index_select(0, index).clamp(min=0)
            if span.whole >= 0:
                each = self._weights.tables.geometry.row_tiles(self._part.own_outputs)
                places = span.whole + tokens.cpu().numpy() * each
                x = x.index_copy(0, index, self._looked_up(adapter, places, x.dtype))
                continue
            if span.tokens:
                x = self._with_rows(x, adapter, span, index, tokens)
                continue
            a = self._weights.rows(adapter, span.a, span.rank, self._part.own_inputs)
            b = self._weights.b(adapter, span, self._part.own_outputs)
            x = x.index_add(0, index, (a[:, tokens].t() @ b).mul_(self._scale).to(x.dtype))
        return x

    def _with_rows(self, x: Tensor, adapter: int, span: Span, index: Tensor, tokens: Tensor) -> Tensor:
        """Return x with an adapter's own rows for some of the tokens at `index`."""
        known, ids = np.array(span.tokens), tokens.cpu().numpy()
        order = known.argsort()
        at = order[np.minimum(np.searchsorted(known, ids, sorter=order), len(known) - 1)]
        has = known[at] == ids
        if not has.any():
            return x
        each = self._weights.tables.geometry.row_tiles(self._part.own_outputs)
        changed = index[torch.from_numpy(has).to(index.device)]
        return x.index_copy(0, changed, self._looked_up(adapter, span.row + at[has] * each, x.dtype))

    def _looked_up(self, adapter: int, places: NDArray[np.int64], dtype: torch.dtype) -> Tensor:
        return self._weights.at(adapter, places, self._part.own_outputs).to(dtype).mul_(self._scale)
