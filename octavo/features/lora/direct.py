"""`DirectReads`: low-rank matrices whose rows are in a file in the same order as in pages, read by few calls.

A thread that reads waits for the interpreter after each call during which others may run, up to 5 ms while a step is
prepared. So one call reads many matrices, and one multiplies or converts many. Matrices of the pages' dtype are read
into their places, unless rows have padding between them: ranks that are no powers of two. Other dtypes, such as
float32, in which PEFT saves adapters unless told otherwise, are converted on the way. Nothing maps the file: the faults
would take as long as the copy. Any range of pages can be read alone.
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

import numpy as np
import torch
from torch import Tensor

from octavo.core.errors import ModelFileError
from octavo.features.lora.adapter_file import STACKED, A, AdapterFile, B
from octavo.features.lora.layout import Geometry, Piece, Span, TargetPart
from octavo.features.lora.storing import ALONE
from octavo.nn.shard import Cut

DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_BATCH = 8 << 20
"""Bytes that one task reads and then multiplies or converts. Converting takes as much memory, which is new if it is
large."""
_MOST_BUFFERS = 1000
"""Of one call; Linux takes up to 1,024."""

_WORDS = {8: np.int64, 4: np.int32, 2: np.int16}
"""By their bytes: rows are copied as words that are as large as possible."""

_Form = tuple[torch.dtype, int, int]
"""How a file has elements: their dtype, how many a row has, and how many it takes in pages; 1 and 1 without padding."""
_Run = tuple[int, int, int, float]
"""Offset in the file in bytes, place in the pages and number of elements there, and their factor."""
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
        self._runs: dict[_Form, list[_Run]] = {}

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
        stride = self._stride(rank)
        if rank != span.rank or part.own_inputs % self._tile or (rank != stride and stride > self._tile):
            return False  # other ranks in between, padding after rows of A, or ranges may end within rows of B
        a, b = self._header[roles[A]], self._header[roles[B]]
        dtype = DTYPES[a.dtype]
        if a.dtype != b.dtype or a.shape != (rank, inputs) or b.shape != (outputs, rank):
            return False
        runs = self._runs.setdefault((dtype, 1, 1), [])
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
        runs = runs if rank == stride else self._runs.setdefault((dtype, rank, stride), [])
        for one in cut.outputs or (range(outputs),):
            runs.append((b.offset + one.start * rank * size, place, len(one) * stride, of_b))
            place += len(one) * stride
        return True

    def tasks(self, fd: int, room: Tensor) -> list[Callable[[], None]]:
        """Return what reads all pieces from the open file, in parts of about equal size that may run at once.

        Args:
            room: [bytes] uint8, the adapter's pages. What belongs elsewhere is not read.
        """
        into = room.view(self._dtype)
        found: list[Callable[[], None]] = []
        for form, (runs, _) in self._in_pages.items():
            found += [partial(self._read, fd, form, batch, into) for batch in _batches(runs, into)]
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
        for form, (runs, ends) in self._in_pages.items():
            own = _within(runs, ends, first, last, form)
            for batch in [own] if own and self._in_place(form) else _batches(own, into):
                self._read(fd, form, batch, into)
        gaps, ends = self._gaps
        for _, place, count, _ in _within(gaps, ends, first, last, (self._dtype, 1, 1)):
            into[place : place + count] = 0

    @functools.cached_property
    def _in_pages(self) -> dict[_Form, _Ordered]:
        """The runs in the order of the pages; when all pieces are taken."""
        return {form: _ordered(sorted(runs, key=itemgetter(1))) for form, runs in self._runs.items()}

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

    def _in_place(self, form: _Form) -> bool:
        """Whether the file has elements as pages have them."""
        dtype, width, stride = form
        return dtype == self._dtype and width == stride

    def _read(self, fd: int, form: _Form, batch: Sequence[_Run], pages: Tensor) -> None:
        dtype, width, stride = form
        batch = sorted(batch)  # in the file's order
        counts = [count // stride * width for _, _, count, _ in batch]
        into, places = pages, [place for _, place, _, _ in batch]
        if not self._in_place(form):
            into, places = torch.empty(sum(counts), dtype=dtype), [0, *accumulate(counts)][:-1]
        self._fill(fd, into, [offset for offset, *_ in batch], places, counts)
        factors = {run[3] for run in batch} - {1.0}
        if factors and dtype != pages.dtype:
            into = _converted(into, torch.float32)  # rounded once, when it is stored
        for factor in factors:
            chosen = [i for i, run in enumerate(batch) if run[3] == factor]
            parts = _views(into, [places[i] for i in chosen], [counts[i] for i in chosen])
            _multiply(parts, factor)
        if width != stride:
            _spread(_converted(into, pages.dtype), form, batch, pages)
        elif into is not pages:
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


def _within(runs: Sequence[_Run], ends: Sequence[int], first: int, last: int, form: _Form) -> list[_Run]:
    """Return the runs, or parts of them, in elements [first, last) of the pages; places count from there.

    Args:
        runs, ends: see `_Ordered`.
        form: theirs. Rows are whole in the range.
    """
    dtype, width, stride = form
    found = []
    for offset, place, count, factor in islice(runs, bisect_right(ends, first), None):
        if place >= last:
            break
        begin, end = max(place, first), min(place + count, last)
        before = (begin - place) // stride * width * dtype.itemsize
        found.append((offset + before, begin - first, end - begin, factor))
    return found


def _batches(runs: Iterable[_Run], pages: Tensor) -> Iterator[list[_Run]]:
    """Divide runs by the order in the file, and their bytes in the pages."""
    batch: list[_Run] = []
    left = _BATCH
    for run in sorted(runs):  # so that each batch reads one stretch of the file
        batch.append(run)
        left -= run[2] * pages.itemsize
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


def _converted(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Return [n] in another dtype."""
    if values.dtype == dtype:
        return values
    made = torch.empty(len(values), dtype=dtype)
    torch._foreach_copy_(_views(made, [0], [len(made)]), _views(values, [0], [len(made)]))
    return made


def _spread(values: Tensor, form: _Form, batch: Sequence[_Run], pages: Tensor) -> None:
    """Write rows, those of each run of a batch after those of the run before, into pages, and 0 after each row."""
    _, width, stride = form
    size = values.itemsize
    word = next(word for word in _WORDS if width * size % word == 0)
    source, target = (one.view(torch.uint8).numpy().view(_WORDS[word]) for one in (values, pages))
    row, step = width * size // word, stride * size // word
    start = 0
    for _, place, count, _ in batch:
        first, rows = place * size // word, count // stride
        given = target[first : first + rows * step].reshape(rows, step)
        given[:, :row] = source[start : start + rows * row].reshape(rows, row)
        given[:, row:] = 0
        start += rows * row


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
