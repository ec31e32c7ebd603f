"""The header of a GGUF file: metadata and tensor locations. Format: ggml's docs/gguf.md, versions 2 and 3.

The `gguf` library reads the same data, but creates several array views per string: 2.5 s for a vocabulary of 49,152, at
the start of every process. This reader costs a length and a slice per string, and decodes strings on demand.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.core.errors import ModelFileError

_MAGIC = b"GGUF"
_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_SIZES = {kind: struct.calcsize("<" + code) for kind, code in _SCALARS.items()}
_MAX_KEYS = 1 << 16
_MAX_TENSORS = 1 << 20
_MAX_DIMS = 4


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """The location of one tensor.

    Attributes:
        shape: outermost dimension first, as in torch and numpy (the file stores the reverse).
        kind: ggml's type number (`gguf.GGMLQuantizationType`).
        offset: of its first byte in the file.
        num_bytes: size of its data as stored.
    """

    name: str
    shape: tuple[int, ...]
    kind: int
    offset: int
    num_bytes: int


class Metadata(Mapping[str, Any]):
    """The key-value section. Values are decoded on first access: arrays become lists, strings `str`."""

    def __init__(self, reader: _Reader, places: dict[str, tuple[int, int]]) -> None:
        self._reader = reader
        self._places = places
        self._values: dict[str, Any] = {}

    def __getitem__(self, key: str) -> Any:
        if key not in self._values:
            kind, place = self._places[key]
            self._values[key] = self._reader.value(kind, place, key)
        return self._values[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


@dataclass(frozen=True, slots=True)
class GGUFFile:
    """The parsed header of a GGUF file."""

    path: Path
    metadata: Metadata
    tensors: dict[str, GGUFTensor]


def read_gguf(path: Path) -> GGUFFile:
    """Read and check the header of a GGUF file: all lengths and tensors must lie within the file.

    Raises:
        ModelFileError: not a GGUF file, an unsupported version, corrupt or truncated; the message names the file.
    """
    try:
        with path.open("rb") as file:
            if file.read(4) != _MAGIC:
                raise ModelFileError(f"{path} is not a GGUF file: it does not begin with 'GGUF'.")
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as exc:
        raise ModelFileError(f"{path} can't be read: {exc.strerror or exc}.") from exc
    reader = _Reader(path, data)
    version = reader.number("I", 4)
    if version not in (2, 3):
        raise ModelFileError(
            f"{path} has GGUF version {version}; little-endian versions 2 and 3 are supported. Convert the model again."
        )
    num_tensors, num_keys = reader.number("Q", 8), reader.number("Q", 16)
    if num_keys > _MAX_KEYS or num_tensors > _MAX_TENSORS:
        raise reader.corrupt(f"it claims {num_keys} keys and {num_tensors} tensors")
    places, place = _walk_keys(reader, 24, num_keys)
    metadata = Metadata(reader, places)
    return GGUFFile(path, metadata, _walk_tensors(reader, place, num_tensors, metadata))


class _Reader:
    """Bounds-checked access to the mapped file. Every error names the file."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path = path
        self.data = data
        self.size = len(data)

    def corrupt(self, what: str) -> ModelFileError:
        return ModelFileError(f"{self.path} is corrupt or truncated: {what}. Download the file again.")

    def check(self, place: int, length: int, what: str) -> None:
        if length < 0 or place + length > self.size:
            raise self.corrupt(f"{what} needs bytes up to {place + length}, but the file ends at {self.size}")

    def number(self, code: str, place: int) -> int:
        self.check(place, struct.calcsize("<" + code), "the header")
        value: int = struct.unpack_from("<" + code, self.data, place)[0]
        return value

    def string(self, place: int, what: str) -> tuple[str, int]:
        """Return a string and the offset after it."""
        start = place + 8
        end = start + self.number("Q", place)
        self.check(place, end - place, what)
        try:
            return self.data[start:end].decode("utf-8"), end
        except UnicodeDecodeError as exc:
            raise self.corrupt(f"{what} is not UTF-8") from exc

    def array_head(self, place: int, what: str) -> tuple[int, int]:
        """Return an array's element type and length."""
        kind, count = self.number("I", place), self.number("Q", place + 4)
        if kind not in _SCALARS and kind != _STRING:
            raise self.corrupt(f"{what} is an array of the unknown type {kind}")
        self.check(place, 12 + count * _SIZES.get(kind, 8), what)
        return kind, count

    def after(self, kind: int, place: int, what: str) -> int:
        """Return the offset after a value."""
        if kind in _SIZES:
            end = place + _SIZES[kind]
        elif kind == _STRING:
            end = place + 8 + self.number("Q", place)
        elif kind == _ARRAY:
            element, count = self.array_head(place, what)
            start = place + 12
            end = self._after_strings(start, count, what) if element == _STRING else start + count * _SIZES[element]
        else:
            raise self.corrupt(f"{what} has the unknown type {kind}")
        self.check(place, end - place, what)
        return end

    def value(self, kind: int, place: int, what: str) -> Any:
        if kind == _STRING:
            return self.string(place, what)[0]
        if kind == _ARRAY:
            return self._array(place, what)
        return struct.unpack_from("<" + _SCALARS[kind], self.data, place)[0]

    def _array(self, place: int, what: str) -> list[Any]:
        kind, count = self.array_head(place, what)
        if kind == _STRING:
            return self._strings(place + 12, count, what)
        return list(struct.unpack_from(f"<{count}{_SCALARS[kind]}", self.data, place + 12))

    def _after_strings(self, place: int, count: int, what: str) -> int:
        length_at, data = struct.Struct("<Q").unpack_from, self.data
        try:
            for _ in range(count):
                place += 8 + length_at(data, place)[0]
        except (struct.error, OverflowError) as exc:
            raise self.corrupt(f"{what} runs past the end of the file") from exc
        return place

    def _strings(self, place: int, count: int, what: str) -> list[str]:
        length_at, data = struct.Struct("<Q").unpack_from, self.data
        items = []
        try:
            for _ in range(count):
                end = place + 8 + length_at(data, place)[0]
                items.append(data[place + 8 : end].decode("utf-8"))
                place = end
        except UnicodeDecodeError as exc:
            raise self.corrupt(f"{what}[{len(items)}] is not UTF-8") from exc
        return items


def _walk_keys(reader: _Reader, place: int, count: int) -> tuple[dict[str, tuple[int, int]], int]:
    places: dict[str, tuple[int, int]] = {}
    for number in range(count):
        key, place = reader.string(place, f"metadata key {number}")
        kind = reader.number("I", place)
        places[key] = (kind, place + 4)
        place = reader.after(kind, place + 4, f"metadata {key!r}")
    return places, place


def _walk_tensors(reader: _Reader, place: int, count: int, metadata: Metadata) -> dict[str, GGUFTensor]:
    found: list[tuple[str, tuple[int, ...], int, int]] = []
    for number in range(count):
        name, place = reader.string(place, f"the name of tensor {number}")
        num_dims = reader.number("I", place)
        if num_dims > _MAX_DIMS:
            raise reader.corrupt(f"tensor {name!r} claims {num_dims} dimensions")
        shape = tuple(reader.number("Q", place + 4 + 8 * dim) for dim in reversed(range(num_dims)))
        place += 4 + 8 * num_dims
        found.append((name, shape, reader.number("I", place), reader.number("Q", place + 4)))
        place += 12
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1:
        raise reader.corrupt(f"general.alignment is {alignment!r}")
    start = (place + alignment - 1) // alignment * alignment
    tensors = {}
    for name, shape, kind, offset in found:
        num_bytes = _num_bytes(reader, name, shape, kind)
        reader.check(start + offset, num_bytes, f"tensor {name!r}")
        tensors[name] = GGUFTensor(name, shape, kind, start + offset, num_bytes)
    return tensors


def _num_bytes(reader: _Reader, name: str, shape: tuple[int, ...], kind: int) -> int:
    if kind not in _BLOCKS:
        raise ModelFileError(f"{reader.path}: tensor {name!r} has the ggml type {kind}, which is not supported.")
    per_block, block_bytes = _BLOCKS[kind]
    if shape and shape[-1] % per_block:
        raise reader.corrupt(f"tensor {name!r} has rows of {shape[-1]} values, not a multiple of {per_block}")
    return math.prod(shape) // per_block * block_bytes


# Values per block -> {ggml type number: bytes per block}. From `gguf.GGML_QUANT_SIZES`, whose import takes 0.2 s.
_BLOCK_BYTES = {
    1: {0: 4, 1: 2, 24: 1, 25: 2, 26: 4, 27: 8, 28: 8, 30: 2},
    32: {2: 18, 3: 20, 6: 22, 7: 24, 8: 34, 9: 40, 20: 18, 39: 17},
    64: {40: 36},
    128: {41: 18},
    256: dict(zip((10, 11, 12, 13, 14, 15, 16, 17), (84, 110, 144, 176, 210, 292, 66, 74), strict=True))
    | dict(zip((18, 19, 21, 22, 23, 29, 34, 35), (98, 50, 110, 82, 136, 56, 54, 66), strict=True)),
}
_BLOCKS = {kind: (values, size) for values, kinds in _BLOCK_BYTES.items() for kind, size in kinds.items()}
