"""Read adapters as the pages that go into blocks; see `layout.py`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from octavo.core.errors import ModelFileError
from octavo.features.lora.adapter_file import (
    MAGNITUDE,
    ROWS,
    STACKED,
    SWAPPED,
    TABLE,
    WHOLE,
    A,
    AdapterFile,
    AdapterForm,
    B,
    unpacked,
)
from octavo.features.lora.checks import read_adapter
from octavo.features.lora.direct import DTYPES, DirectReads, is_exact, read_all
from octavo.features.lora.experts import pair_of
from octavo.features.lora.layout import Geometry, Layout, Piece, Span, StoredPart, TargetPart, layout
from octavo.features.lora.payload import Reading, Source
from octavo.features.lora.storing import scale_in_place, store
from octavo.features.lora.targets import Targets
from octavo.hub.gguf_file import read_gguf
from octavo.nn.linear import Linear
from octavo.nn.pages import large
from octavo.nn.shard import Heads

_ANY = 1 << 30
_FORMS_KEPT = 8
"""Forms of adapters, each with the plan of reading them."""
_TENSORS_KEPT = 8
"""Of a file that is being read: twice as many as have the experts of a layer."""
HELPERS = 4
"""Threads that copy parts of an adapter at once."""
_LOOKS = 4

Gains = Callable[[Piece, Tensor, Tensor, Tensor], Tensor]
"""Return the gains [own outputs] float32 of a piece, from A [rank, inputs], B [outputs, rank] and magnitudes [outputs]
of the whole projection; see `gains.py`."""


class _Tensors(Protocol):
    """The tensors of an open file."""

    def __call__(self, name: str) -> Tensor: ...


@dataclass(slots=True)
class _Form:
    """A form of adapters.

    Attributes:
        plan: where the pieces of one go that is used alone, with weight 1, and how they are read; None if that is not
            known, or not all are read directly.
    """

    form: AdapterForm
    plan: tuple[Layout, DirectReads] | None = None

    @classmethod
    def unpacked(cls, form: bytes) -> _Form:
        return cls(AdapterForm.unpacked(form))


@dataclass(frozen=True, slots=True)
class Reader:
    """Reads adapters for one rank of a model. May be called from any thread.

    Attributes:
        dtype: of the elements in pages.
        gains: computes the gains of adapters with magnitudes.
        helpers: threads that copy parts of an adapter at once; None to use the caller's only.
        forms: returns what was packed; keeps those of the last adapters, since many are alike.
    """

    targets: Targets
    geometry: Geometry
    dtype: torch.dtype
    gains: Gains
    helpers: Executor | None = None
    forms: Callable[[bytes], _Form] = field(
        default_factory=lambda: lru_cache(maxsize=_FORMS_KEPT)(_Form.unpacked), init=False, compare=False
    )

    def read(self, reading: Reading) -> tuple[Layout, Tensor, str]:
        """Return what `open` finds: the layout, the pages and the version. Raises the same."""
        found = self.open(reading)
        return found.layout, found.read(self.helpers), found.version

    @torch.inference_mode()
    def open(self, reading: Reading) -> OpenAdapter:
        """Check an adapter's files, and find where the rank's part is.

        Raises:
            ModelFileError: a file can't be read, or has other shapes than when it was checked.
        """
        files = [self._checked(source) for source in reading.sources]
        alone = len(files) == 1 and reading.sources[0].weight == 1.0 and reading.manifest == files[0].manifest
        known = self.forms(files[0].form.packed) if alone else None
        if known is not None and known.plan is not None:
            placed, direct = known.plan
            return OpenAdapter(placed, [_OpenFile(files[0], direct.of(files[0]), ())])
        placed, sources = self._planned(reading, files)
        if known is not None and not sources[0].fills:
            known.plan = placed, sources[0].direct
        return OpenAdapter(placed, sources)

    def _planned(self, reading: Reading, files: Sequence[AdapterFile]) -> tuple[Layout, list[_OpenFile]]:
        """Return where the adapter's pieces go, and how they are read."""
        targets, geometry = self.targets.targets, self.geometry
        own = self.targets.own
        placed = layout(targets, reading.manifest.among(own), geometry)
        filled = dict.fromkeys(placed.spans, 0)
        sources: list[_OpenFile] = []
        for source, file in zip(reading.sources, files, strict=True):
            tensors = _gguf(file.weights) if file.weights.suffix == ".gguf" else _safetensors(file)
            direct = DirectReads(file, geometry, self.dtype)
            fills: list[Callable[[Tensor], None]] = []
            for piece, roles in zip(file.form.manifest.pieces, file.form.tensors, strict=True):
                if piece.target not in own:
                    continue
                place = piece.target, piece.part
                span, first = placed.spans[place], filled[place]
                part = targets[piece.target].parts[piece.part]
                cut = self.targets.cuts[piece.target][piece.part]
                order = self.targets.orders[piece.target][piece.part]
                if not direct.take(span, piece, roles, part, cut, order, piece.scale * source.weight):
                    fills.append(partial(self._fill, span, first, piece, roles, file, tensors, source.weight))
                filled[place] += piece.rank
            sources.append(_OpenFile(file, direct, fills))
        return placed, sources

    def _checked(self, source: Source) -> AdapterFile:
        """Return an adapter's file, which is checked again only if it has changed since it was checked."""
        if source.file and (known := unpacked(source.file, lambda form: self.forms(form).form)).unchanged:
            return known
        file = read_adapter(Path(source.path), self.targets.targets, _ANY, _ANY)
        if file.manifest != source.manifest:
            raise ModelFileError(f"{file.weights} has changed since the adapter was loaded. Load it again.")
        return file

    def _fill(
        self,
        span: Span,
        first: int,
        piece: Piece,
        roles: Mapping[str, str],
        file: AdapterFile,
        tensors: _Tensors,
        weight: float,
        room: Tensor,
    ) -> None:
        """Write a piece, its low-rank matrices from rank `first` of the span on."""
        target = self.targets.targets[piece.target]
        cut = self.targets.cuts[piece.target][piece.part]
        order = self.targets.orders[piece.target][piece.part]
        if piece.whole:
            values = _columns(cut.rows_of(_in_order(tensors(roles[WHOLE]), order)), cut.inputs)
            store(values, self._rows(room, span.whole, len(values), values.shape[1], self.dtype))
            return
        if piece.tokens:  # all ranks have them: they are few
            values = _columns(_rows_of_tokens(piece, roles, tensors), cut.inputs)
            store(values, self._rows(room, span.row, len(values), values.shape[1], self.dtype))
            return
        a, b = tensors(roles[A]), tensors(roles[B])
        if file.form.pairs:
            a, b = self._as_stored_by_peft(piece, a, b)
        part = target.parts[piece.part]
        if STACKED in roles:
            a, b = pair_of(a, b, target.expert, piece.rank, swapped=roles[STACKED] == SWAPPED)
        b = _in_order(_selected(b, part, part.stack if STACKED in roles else part.stored), order)
        if piece.gain:
            magnitudes = _selected(tensors(roles[MAGNITUDE]).flatten(), part, part.stored)
            made = self.gains(piece, a, b, _in_order(magnitudes, order))
            self._rows(room, span.gain, 1, len(made), torch.float32).copy_(made)
        narrow = a.shape[1] < len(b)  # of the whole adapter, so that all ranks scale the same matrix
        a, b = _columns(a, cut.inputs), cut.rows_of(b)
        inputs = self.geometry.row_tiles(part.own_inputs)
        into_a = self._rows(room, span.a + first * inputs, piece.rank, part.own_inputs, self.dtype)
        into_b = self._b(room, span, first, piece.rank, part.own_outputs)
        scale = piece.scale * weight
        if b.dtype != self.dtype:  # rounded once
            store(a, into_a)
            store(self._in_form(b.float() * scale), into_b)
        elif is_exact(scale) and narrow:  # either matrix can be scaled, and the smaller one takes less time
            store(a, into_a, scale)
            store(self._in_form(b), into_b)
        else:
            store(a, into_a)
            store(self._in_form(b), into_b)
            scale_in_place(into_b, scale)

    def _b(self, room: Tensor, span: Span, first: int, rank: int, outputs: int) -> Tensor:
        """Return the place of ranks [first, first + rank) of a piece's B, [outputs, rank] or [rank, outputs]."""
        geometry = self.geometry
        if not geometry.by_output:
            return self._rows(room, span.b + first * geometry.row_tiles(outputs), rank, outputs, self.dtype)
        stride = geometry.stride(span.rank)
        whole = self._rows(room, span.b, 1, outputs * stride, self.dtype).view(outputs, stride)
        return whole[:, first : first + rank]

    def _in_form(self, b: Tensor) -> Tensor:
        """Return B [outputs, rank] as the geometry has it."""
        return b if self.geometry.by_output else b.t()

    def _rows(self, room: Tensor, tile: int, count: int, elements: int, dtype: torch.dtype) -> Tensor:
        """Return rows of a place as [count, elements]."""
        size = self.geometry.tile_bytes
        width = -(-elements * dtype.itemsize // size) * size
        return room[tile * size : tile * size + count * width].view(dtype).view(count, -1)[:, :elements]

    def _as_stored_by_peft(self, piece: Piece, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """Undo llama.cpp's order of the rows of q and k."""
        from octavo.models.load.gguf import in_halves

        layer = self.targets.layers[piece.target]
        if isinstance(layer, Linear) and isinstance(layer.shard, Heads) and piece.part < 2:
            b = in_halves(b, len(b) // layer.shard.head_dim)
        return a, b


@dataclass(frozen=True, slots=True)
class _OpenFile:
    """One of an adapter's files. Pieces are read by `direct` or by `fills`, which take all of the pages."""

    file: AdapterFile
    direct: DirectReads
    fills: Sequence[Callable[[Tensor], None]]

    def tasks(self, fd: int, room: Tensor) -> list[Callable[[], None]]:
        return [*self.direct.tasks(fd, room), *(partial(fill, room) for fill in self.fills)]

    def check(self) -> None:
        if not self.file.unchanged:
            raise ModelFileError(f"{self.file.weights} changed while it was read. Ask again once it is complete.")


@dataclass(frozen=True, slots=True)
class OpenAdapter:
    """An adapter whose files were checked. Its pages can be read as long as the files do not change.

    Attributes:
        layout: of the rank's part.
    """

    layout: Layout
    _sources: Sequence[_OpenFile]

    @property
    def version(self) -> str:
        """That of the files, when they were checked."""
        return " ".join(source.file.version for source in self._sources)

    @property
    def in_memory(self) -> bool:
        """Whether each page can be read alone, and the file seems to be in the page cache."""
        if len(self._sources) != 1 or self._sources[0].fills:
            return False
        return _cached(self._sources[0].file.weights)

    @torch.inference_mode()
    def read(self, helpers: Executor | None) -> Tensor:
        """Return the pages, [blocks, block bytes] uint8.

        Args:
            helpers: threads that read parts at once; None to use the caller's only.

        Raises:
            ModelFileError: a file can't be read, or has changed since it was checked.
        """
        count, size = self.layout.num_blocks, self.layout.geometry.block_bytes
        room = large(count * size)[: count * size]
        for source in self._sources:
            with _opened(source.file.weights) as fd:
                _run(source.tasks(fd, room), helpers)
            source.check()
        return room.view(count, size)

    @torch.inference_mode()
    def fill(self, first: int, pages: Tensor) -> None:
        """Read pages from number `first` on into [n, block bytes] uint8. Only if each page can be read alone.

        Raises:
            ModelFileError: as `read`.
        """
        (source,) = self._sources
        start, room = first * self.layout.geometry.block_bytes, pages.view(-1)
        with _opened(source.file.weights) as fd:
            source.direct.fill(fd, room, start)
        source.check()


def _cached(path: Path) -> bool:
    """Whether some places of a file are in the page cache. Each look may cost a wait for the interpreter, so they are
    few."""
    with _opened(path) as fd:
        size, byte = os.fstat(fd).st_size, bytearray(1)
        try:
            return all(os.preadv(fd, [byte], size * i // _LOOKS, os.RWF_NOWAIT) for i in range(_LOOKS))
        except (OSError, AttributeError):  # not there, or a system that can't tell
            return False


def _run(tasks: Sequence[Callable[[], None]], helpers: Executor | None) -> None:
    """Run all, a share of them in each thread. Shares, since threads wait for the interpreter between tasks.

    Each share has the same mixture of long and short ones.
    """
    if helpers is None:
        _run_all(tasks)
        return
    shares = [tasks[i::HELPERS] for i in range(min(HELPERS, len(tasks)))]
    running = [helpers.submit(_run_all, share) for share in shares]
    wait(running)  # all: they write to memory and read from the file
    for ended in running:
        ended.result()


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    """Open a file to read."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise ModelFileError(f"{path} can't be read: {error}.") from error
    try:
        yield fd
    finally:
        os.close(fd)


@torch.inference_mode()
def _run_all(fills: Sequence[Callable[[], None]]) -> None:
    for fill in fills:
        fill()


def _rows_of_tokens(piece: Piece, roles: Mapping[str, str], tensors: _Tensors) -> Tensor:
    """Return the rows of a piece's tokens: those that were trained alone come first, then those of a whole table."""
    if TABLE not in roles:
        return tensors(roles[ROWS])
    table = tensors(roles[TABLE])
    trained = tensors(roles[ROWS]) if ROWS in roles else table[:0]
    return torch.cat([trained.to(table.dtype), table[list(piece.tokens[len(trained) :])]])


def _selected(outputs: Tensor, part: TargetPart, stored: StoredPart | None) -> Tensor:
    """Return a projection's rows of the matrix for the module that holds it."""
    if stored is None or not stored.run or len(outputs) == part.outputs:
        return outputs
    runs: Tensor = outputs.unflatten(0, (-1, stored.run))
    return runs[:, stored.begin : stored.end].flatten(0, 1)


def _in_order(outputs: Tensor, order: tuple[int, ...] | None) -> Tensor:
    """Return the rows of each head in the model's order; see `Targets.orders`."""
    if order is None:
        return outputs
    heads: Tensor = outputs.unflatten(0, (-1, len(order)))
    return heads[:, list(order)].flatten(0, 1)


def _columns(matrix: Tensor, inputs: range | None) -> Tensor:
    """Return a rank's inputs of a matrix [outputs, inputs]; None for all."""
    return matrix if inputs is None else matrix[:, inputs.start : inputs.stop]


def _safetensors(file: AdapterFile) -> _Tensors:
    """Return a reader of tensors, which keeps the last ones, since pieces may be parts of one.

    The file is not mapped: a page of it that is gone, since a program writes a new version, would end the process.
    """
    path, header = file.weights, file.form.header

    @lru_cache(maxsize=_TENSORS_KEPT)
    def tensor(name: str) -> Tensor:
        stored = header[name]
        data = torch.empty(stored.num_bytes, dtype=torch.uint8)
        with _opened(path) as fd:
            read_all(path, fd, stored.offset, [data.numpy().data] if stored.num_bytes else [])
        return data.view(DTYPES[stored.dtype]).view(stored.shape)

    return tensor


def _gguf(path: Path) -> _Tensors:
    from gguf import GGMLQuantizationType

    from octavo.models.load.gguf_blocks import dequantize

    tensors = read_gguf(path).tensors

    def tensor(name: str) -> Tensor:
        stored = tensors[name]
        data = np.fromfile(path, dtype=np.uint8, count=stored.num_bytes, offset=stored.offset)
        values = dequantize(torch.from_numpy(data), GGMLQuantizationType(stored.kind), torch.float32)
        values = values.view(stored.shape)
        # llama.cpp looks tokens up in the rows of A.
        return values.t() if name == "token_embd.weight.lora_a" else values

    return tensor
