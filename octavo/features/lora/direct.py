"""`DirectReads`: low-rank matrices whose elements are in a file in the same order as in pages, read by few calls.

A thread that reads waits for the interpreter after each call during which others may run, up to 5 ms while a step is
prepared. So one call reads many matrices, and one multiplies or converts many. Matrices of the pages' dtype are read
into their places. Float32, in which PEFT saves adapters unless told otherwise, is converted on the way. Nothing maps
the file: the faults would take as long as the copy. Any range of pages can be read alone.
"""

from __future__ import annotations

import copy
import functools
import math
import os
import struct
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate, chain, islice
from operator import itemgetter
from pathlib import Path

import torch
from torch import Tensor

from octavo.core.errors import ModelFileError
from octavo.features.lora.adapter_file import STACKED, A, AdapterFile, B
from octavo.features.lora.layout import Geometry, Piece, Span, TargetPart
from octavo.nn.shard import Cut

DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
ALONE = 1 << 15
"""Most elements of an operation that torch does not divide over threads."""
_BATCH = 8 << 20
"""Bytes that one task reads and then multiplies or converts. Converting takes as much memory, which is new if it is
large."""
_MOST_BUFFERS = 1000
"""Of one call; Linux takes up to 1,024."""

_Run = tuple[int, int, int, float]
"""Offset in the file in bytes, place in the pages and number of elements, and their factor."""
_Ordered = tuple[list[_Run], list[int]]
"""Runs in the order of the pages, and the elements where they end there."""
_ENDLESS = 1 << 62


def is_exact(scale: float) -> bool:
    """Whether it is a power of two, so that products are exact and A can be scaled in place of B."""
    return abs(math.frexp(scale)[0]) == 0.5


class DirectReads:
    """The pieces of one file that can be read in this way.

    Args:
        dtype: of the pages' elements.
    """

    def __init__(self, file: AdapterFile, geometry: Geometry, dtype: torch.dtype) -> None:
        self._path, self._header = file.weights, file.form.header
        self._possible = geometry.by_output and bool(self._header)  # which GGUF files lack
        self._stride = geometry.stride
        self._tile = geometry.tile_bytes // geometry.element_size
        self._dtype = dtype
        self._runs: dict[torch.dtype, list[_Run]] = {dtype: [], torch.float32: []}
        """By the dtype in the file."""

    def of(self, file: AdapterFile) -> DirectReads:
        """Return the same for another file of this form, when all pieces are taken."""
        _ = self._in_pages, self._gaps  # made once for all of them
        made = copy.copy(self)
        made._path = file.weights
        return made

    def take(
        self,
        span: Span,
        piece: Piece,
        roles: Mapping[str, str],
        part: TargetPart,
        cut: Cut,
        order: tuple[int, ...] | None,
        scale: float,
    ) -> bool:
        """Read a piece later; False if it must be read otherwise.

        Args:
            span: where all ranks of the piece are; a sum has more than the piece.
            order: see `Targets.orders`.
            scale: factor of the low-rank product.
        """
        if not self._possible or piece.gain or piece.replaces or order is not None or STACKED in roles:
            return False
        rank, inputs, outputs = piece.rank, part.inputs, part.outputs
        if rank != span.rank or rank != self._stride(rank) or part.own_inputs % self._tile:
            return False  # not without padding or other ranks in between
        a, b = self._header[roles[A]], self._header[roles[B]]
        dtype = DTYPES[a.dtype]
        runs = self._runs.get(dtype)
        if runs is None or a.dtype != b.dtype or a.shape != (rank, inputs) or b.shape != (outputs, rank):
            return False
        # The whole matrices decide which one is scaled, so that all ranks scale the same one.
        narrow = dtype == self._dtype and inputs < outputs and is_exact(scale)
        of_a, of_b = (scale, 1.0) if narrow else (1.0, scale)
        size, place = dtype.itemsize, span.a * self._tile
        if cut.inputs is None:
            runs.append((a.offset, place, rank * inputs, of_a))
        else:
            own, first, step = part.own_inputs, a.offset + cut.inputs.start * size, inputs * size
            runs += [(first + i * step, place + i * own, own, of_a) for i in range(rank)]
        place = span.b * self._tile
        for one in cut.outputs or (range(outputs),):
            runs.append((b.offset + one.start * rank * size, place, len(one) * rank, of_b))
            place += len(one) * rank
        return True

    def tasks(self, fd: int, room: Tensor) -> list[Callable[[], None]]:
        """Return what reads all pieces from the open file, in parts of about equal size that may run at once.

        Args:
            room: [bytes] uint8, the adapter's pages. What belongs elsewhere is not read.
        """
        into = room.view(self._dtype)
        found: list[Callable[[], None]] = []
        for dtype, (runs, _) in self._in_pages.items():
            found += [partial(self._read, fd, dtype, batch, into) for batch in _batches(runs, dtype)]
        return found

    def fill(self, fd: int, room: Tensor, start: int) -> None:
        """Read a range of the pages from the open file, and fill what pieces leave of it with 0: the ends of last tiles
        and of the last block.

        Args:
            room: [bytes] uint8.
            start: the range's first byte.
        """
        into, size = room.view(self._dtype), self._dtype.itemsize
        first, last = start // size, start // size + len(into)
        for dtype, (runs, ends) in self._in_pages.items():
            own = _within(runs, ends, first, last, dtype.itemsize)
            for batch in [own] if dtype == self._dtype and own else _batches(own, dtype):
                self._read(fd, dtype, batch, into)
        gaps, ends = self._gaps
        for _, place, count, _ in _within(gaps, ends, first, last, 0):
            into[place : place + count] = 0

    @functools.cached_property
    def _in_pages(self) -> dict[torch.dtype, _Ordered]:
        """The runs in the order of the pages; when all pieces are taken."""
        return {dtype: _ordered(sorted(runs, key=itemgetter(1))) for dtype, runs in self._runs.items()}

    @functools.cached_property
    def _gaps(self) -> _Ordered:
        """What no run fills, likewise."""
        found: list[_Run] = []
        end = 0
        for _, place, count, _ in sorted(chain(*self._runs.values()), key=itemgetter(1)):
            if place > end:
                found.append((0, end, place - end, 1.0))
            end = place + count
        return _ordered([*found, (0, end, _ENDLESS, 1.0)])

    def _read(self, fd: int, dtype: torch.dtype, batch: Sequence[_Run], pages: Tensor) -> None:
        batch = sorted(batch)  # in the file's order
        counts = [count for _, _, count, _ in batch]
        into, places = pages, [place for _, place, _, _ in batch]
        if dtype != pages.dtype:
            into, places = torch.empty(sum(counts), dtype=dtype), [0, *accumulate(counts)][:-1]
        self._fill(fd, into, [offset for offset, *_ in batch], places, counts)
        for factor in {run[3] for run in batch} - {1.0}:
            chosen = [i for i, run in enumerate(batch) if run[3] == factor]
            parts = _views(into, [places[i] for i in chosen], [counts[i] for i in chosen])
            _multiply(parts, factor)
        if into is not pages:
            given = _views(pages, [place for _, place, _, _ in batch], counts)
            torch._foreach_copy_(given, _views(into, places, counts))

    def _fill(self, fd: int, into: Tensor, offsets: list[int], places: list[int], counts: list[int]) -> None:
        """Read runs of elements in the file's order: consecutive ones by one call."""
        memory, size = into.view(torch.uint8).numpy().data, into.dtype.itemsize
        buffers: list[memoryview] = []
        begin = end = 0
        for offset, place, count in zip(offsets, places, counts, strict=True):
            if offset != end or len(buffers) == _MOST_BUFFERS:
                read_all(self._path, fd, begin, buffers)
                begin, buffers = offset, []
            buffers.append(memory[place * size : (place + count) * size])
            end = offset + count * size
        read_all(self._path, fd, begin, buffers)


def read_all(path: Path, fd: int, offset: int, buffers: list[memoryview]) -> None:
    """Read consecutive bytes of an open file into buffers.

    Raises:
        ModelFileError: they can't be read, or the file ends before.
    """
    while buffers:
        try:
            count = os.preadv(fd, buffers, offset)
        except OSError as error:
            raise ModelFileError(f"{path} can't be read: {error}.") from error
        if not count:
            raise ModelFileError(f"{path} changed while it was read. Ask again once it is complete.")
        offset += count
        while buffers and count >= len(buffers[0]):
            count -= len(buffers.pop(0))
        if count:
            buffers[0] = buffers[0][count:]


def _ordered(runs: list[_Run]) -> _Ordered:
    return runs, [place + count for _, place, count, _ in runs]


def _within(runs: Sequence[_Run], ends: Sequence[int], first: int, last: int, size: int) -> list[_Run]:
    """Return the runs, or parts of them, in elements [first, last) of the pages; places count from there.

    Args:
        runs, ends: see `_Ordered`.
        size: bytes of an element in the file.
    """
    found = []
    for offset, place, count, factor in islice(runs, bisect_right(ends, first), None):
        if place >= last:
            break
        begin, end = max(place, first), min(place + count, last)
        found.append((offset + (begin - place) * size, begin - first, end - begin, factor))
    return found


def _batches(runs: Iterable[_Run], dtype: torch.dtype) -> Iterator[list[_Run]]:
    """Divide runs by the order in the file."""
    batch: list[_Run] = []
    left = _BATCH
    for run in sorted(runs):  # of which each then reads one stretch
        batch.append(run)
        left -= run[2] * dtype.itemsize
        if left <= 0:
            yield batch
            batch, left = [], _BATCH
    if batch:
        yield batch


def _views(values: Tensor, places: Sequence[int], counts: Sequence[int]) -> list[Tensor]:
    """Return these disjoint runs of [n] as views of at most ALONE elements, all made by one call."""
    sizes: list[int] = []
    first = {}
    end = start = min(places)
    for place, count in sorted(zip(places, counts, strict=True)):
        sizes.append(place - end)
        first[place] = len(sizes)
        sizes += [ALONE] * (count // ALONE)
        sizes.append(count % ALONE)
        end = place + count
    views = values[start:end].split_with_sizes(sizes)
    found: list[Tensor] = []
    for place, count in zip(places, counts, strict=True):
        found += views[first[place] : first[place] + count // ALONE + 1]
    return found


def _is_in(dtype: torch.dtype, value: float) -> bool:
    """Whether a dtype of `DTYPES` has this value. Without torch, all of whose functions wait for the interpreter."""
    try:
        stored = struct.pack("<e" if dtype == torch.float16 else "<f", value)
    except OverflowError:
        return False
    exact = struct.unpack("<e" if dtype == torch.float16 else "<f", stored) == (value,)
    return exact and (dtype != torch.bfloat16 or stored[:2] == bytes(2))


def _multiply(parts: list[Tensor], factor: float) -> None:
    """Multiply all in place, rounding once."""
    if _is_in(parts[0].dtype, factor):
        torch._foreach_mul_(parts, factor)
        return
    for part in parts:  # the call for all would round the factor to the dtype
        part.mul_(factor)
