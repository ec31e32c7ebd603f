"""List and check the safetensors files of a folder; tensor data is not read.

Format: https://huggingface.co/docs/safetensors (8 bytes of header length, a JSON header, then the tensors).
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from octavo.core.errors import ModelFileError
from octavo.hub.json_file import read_json

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_LENGTH_BYTES = 8
_MAX_HEADER = 100 * 1024 * 1024  # the format's own limit


def safetensors_files(folder: Path) -> tuple[Path, ...]:
    """Return the model's weight files, checked; empty if the folder has none.

    Raises:
        ModelFileError: a corrupt index, or a shard that is missing, corrupt or truncated.
    """
    if (folder / INDEX).is_file():
        paths = _from_index(folder / INDEX)
    elif (folder / SINGLE).is_file():
        paths = [folder / SINGLE]
    else:
        paths = sorted(path for path in folder.glob("*.safetensors") if not path.name.startswith("consolidated"))
    for path in paths:
        check_safetensors(path)
    return tuple(paths)


def check_safetensors(path: Path) -> None:
    """Check that the header matches the file's length.

    Raises:
        ModelFileError: not readable, corrupt or truncated.
    """
    read_header(path)


class StoredTensor(msgspec.Struct, frozen=True, array_like=True):
    """A tensor of a safetensors file.

    Attributes:
        dtype: the format's name of it, such as "BF16".
        offset, num_bytes: of its data in the file.
    """

    dtype: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class StoredHeader:
    """The header of a safetensors file, not parsed yet.

    Attributes:
        content: its JSON.
        size: bytes of the whole file.
    """

    path: Path
    content: bytes
    size: int

    @classmethod
    def of(cls, path: Path) -> StoredHeader:
        """Read a file's header.

        Raises:
            ModelFileError: not readable, or no header of this length fits into the file.
        """
        try:
            size = path.stat().st_size
            with path.open("rb") as file:
                if size < _LENGTH_BYTES:
                    raise _corrupt(path, f"it has only {size} bytes")
                length = struct.unpack("<Q", file.read(_LENGTH_BYTES))[0]
                if not 0 < length <= min(_MAX_HEADER, size - _LENGTH_BYTES):
                    raise _corrupt(path, f"it claims a header of {length} bytes in a file of {size}")
                return cls(path, file.read(length), size)
        except OSError as exc:
            raise ModelFileError(f"{path} can't be read: {exc.strerror or exc}.") from exc
        except ValueError as exc:
            raise _corrupt(path, "its header is not valid") from exc

    def tensors(self) -> dict[str, StoredTensor]:
        """Return the file's tensors by name.

        Raises:
            ModelFileError: corrupt or truncated.
        """
        try:
            header = json.loads(self.content)
            start = _LENGTH_BYTES + len(self.content)
            found = {name: _entry(entry, start) for name, entry in header.items() if name != "__metadata__"}
        except (ValueError, KeyError, TypeError, IndexError, AttributeError) as exc:
            raise _corrupt(self.path, "its header is not valid") from exc
        if not self.fits(found):
            expected = max(tensor.offset + tensor.num_bytes for tensor in found.values())
            raise _corrupt(self.path, f"its header promises {expected} bytes, the file has {self.size}")
        return found

    def fits(self, tensors: Mapping[str, StoredTensor]) -> bool:
        """Return whether the file is as long as its tensors need, given those of this header."""
        return all(tensor.offset + tensor.num_bytes <= self.size for tensor in tensors.values())


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a file by name, after the checks of `check_safetensors`. Raises likewise."""
    return StoredHeader.of(path).tensors()


def _entry(entry: dict[str, Any], start: int) -> StoredTensor:
    begin, end = map(int, entry["data_offsets"])
    return StoredTensor(str(entry["dtype"]), tuple(map(int, entry["shape"])), start + begin, end - begin)


def _from_index(path: Path) -> list[Path]:
    weight_map: Any = read_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map or not all(isinstance(v, str) for v in weight_map.values()):
        raise ModelFileError(f"{path} has no weight_map from tensor names to files. Download it again.")
    shards = sorted(set(weight_map.values()))
    missing = [shard for shard in shards if not (path.parent / shard).is_file()]
    if missing:
        raise ModelFileError(
            f"{path} names {len(shards)} files, of which {len(missing)} are missing from the folder: "
            f"{', '.join(missing[:5])}{', ...' if len(missing) > 5 else ''}. Download them."
        )
    return [path.parent / shard for shard in shards]


def _corrupt(path: Path, what: str) -> ModelFileError:
    return ModelFileError(f"{path} is corrupt or truncated: {what}. Download the file again.")
