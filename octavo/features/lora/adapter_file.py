"""`AdapterFile`: an adapter's files as they were checked. No torch here."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import msgspec

from octavo.features.lora.layout import Manifest
from octavo.hub.safetensors_files import StoredTensor

A, B, MAGNITUDE, WHOLE, ROWS, TABLE = "a", "b", "magnitude", "whole", "rows", "table"
STACKED = "stacked"
"""Not a tensor's role: how A and B hold the matrices of all experts, STRAIGHT or SWAPPED; see `experts.pair_of`."""
STRAIGHT, SWAPPED = "straight", "swapped"

Stamp = tuple[int, int, int, int]
"""A file's inode, size, and times of change of its content and of its inode. The last one shows changes by programs
that set the time of the content, such as `cp -p` and rsync."""


@dataclass(frozen=True)
class AdapterForm:
    """What an adapter's files say about its tensors: everything but where they are, and the numbers in them.

    Attributes:
        manifest: what it has.
        tensors: for each piece of the manifest, role -> the tensor's name in the file. Roles: A, B, MAGNITUDE, WHOLE,
            ROWS (of single tokens), TABLE (has those of added tokens); and STACKED, see there.
        pairs: rows of q and k are in llama.cpp's order for Llama, which pairs adjacent channels.
        header: where a safetensors file has each tensor.
    """

    manifest: Manifest
    tensors: tuple[Mapping[str, str], ...]
    pairs: bool = False
    header: Mapping[str, StoredTensor] = field(default_factory=dict)

    @cached_property
    def packed(self) -> bytes:
        """It compressed, for `unpacked`: to about a hundredth, since names of tensors are much alike."""
        fields = self.manifest, self.tensors, self.pairs, self.header
        return zlib.compress(msgspec.msgpack.encode(fields), level=1)

    @classmethod
    def unpacked(cls, form: bytes) -> AdapterForm:
        """Return what `packed` packed."""
        made = cls(*msgspec.msgpack.decode(zlib.decompress(form), type=_Fields))
        made.__dict__["packed"] = form
        return made


_Fields = tuple[Manifest, tuple[dict[str, str], ...], bool, dict[str, StoredTensor]]


@dataclass(frozen=True, slots=True)
class AdapterFile:
    """An adapter's files, checked.

    Attributes:
        weights: the file with its tensors.
        form: what the files say about them.
        stamps: of the files that were read, by path: they show changes without reading the files again.
    """

    weights: Path
    form: AdapterForm
    stamps: Mapping[str, Stamp] = field(default_factory=dict)

    @property
    def manifest(self) -> Manifest:
        return self.form.manifest

    @property
    def tensors(self) -> tuple[Mapping[str, str], ...]:
        return self.form.tensors

    def packed(self) -> bytes:
        """Return it for `unpacked`."""
        return msgspec.msgpack.encode((str(self.weights), self.form.packed, self.stamps))

    @property
    def version(self) -> str:
        """A digest of the stamps: the files' content is the same while this is."""
        return hashlib.blake2b(repr(sorted(self.stamps.items())).encode(), digest_size=16).hexdigest()

    @property
    def unchanged(self) -> bool:
        """Whether the files are still those that were checked."""
        try:
            return bool(self.stamps) and all(stamp_of(Path(path)) == stamp for path, stamp in self.stamps.items())
        except OSError:
            return False


def unpacked(file: bytes, form_of: Callable[[bytes], AdapterForm] = AdapterForm.unpacked) -> AdapterFile:
    """Return what `AdapterFile.packed` packed.

    Args:
        form_of: returns what `AdapterForm.packed` packed; for callers that keep forms.
    """
    weights, form, stamps = msgspec.msgpack.decode(file, type=tuple[str, bytes, dict[str, Stamp]])
    return AdapterFile(Path(weights), form_of(form), stamps)


def stamp_of(path: Path) -> Stamp:
    """Return a file's stamp. Raises OSError."""
    found = path.stat()
    return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns
