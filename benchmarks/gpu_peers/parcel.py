"""Carry a folder of installed packages over a narrow way: compressed into parts of a given size, joined and checked.

    python benchmarks/gpu_peers/parcel.py pack FOLDER PARTS --part-mib 55
    python benchmarks/gpu_peers/parcel.py unpack PARTS FOLDER

For machines without network to which only small files can be copied. The parts may arrive in any order and one by one;
unpacking refuses parts that are missing or damaged before it writes anything.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import lzma
import sys
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

MANIFEST = "manifest.json"
# GPU libraries hold nearly the same machine code for each chip, far apart: a large dictionary finds it again.
_FILTERS: list[dict[str, Any]] = [{"id": lzma.FILTER_LZMA2, "preset": 6, "dict_size": 1 << 27}]


class ParcelError(Exception):
    """Parts that cannot be joined."""


def pack(folder: Path, parts: Path, part_bytes: int) -> list[Path]:
    """Write `folder` as parts of at most `part_bytes` bytes and a manifest with their SHA-256 digests."""
    parts.mkdir(parents=True, exist_ok=True)
    writer = _PartWriter(parts, part_bytes)
    with (
        lzma.LZMAFile(writer, "w", filters=_FILTERS) as packed,  # type: ignore[arg-type]
        tarfile.open(fileobj=packed, mode="w|") as archive,
    ):
        archive.add(folder, arcname=".", filter=_without_caches)
    writer.finish()
    manifest = {path.name: _digest(path) for path in writer.written}
    (parts / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    return writer.written


def unpack(parts: Path, folder: Path) -> None:
    """Join the parts and write what was packed into `folder`.

    Raises:
        ParcelError: a part is missing or damaged.
    """
    manifest = parts / MANIFEST
    if not manifest.is_file():
        raise ParcelError(f"{manifest} is missing: copy it together with the parts.")
    digests = json.loads(manifest.read_text(encoding="utf-8"))
    for name, digest in digests.items():
        if not (parts / name).is_file():
            raise ParcelError(f"{parts / name} is missing: copy it, then unpack again.")
        if _digest(parts / name) != digest:
            raise ParcelError(f"{parts / name} differs from what was packed: copy it again.")
    folder.mkdir(parents=True, exist_ok=True)
    source = io.BufferedReader(_PartReader(parts / name for name in digests), 1 << 20)
    with lzma.LZMAFile(source) as packed, tarfile.open(fileobj=packed, mode="r|") as archive:
        archive.extractall(folder, filter="data")


class _PartWriter:
    """A file to write to that begins another file whenever one is full."""

    def __init__(self, folder: Path, part_bytes: int) -> None:
        self.written: list[Path] = []
        self._folder, self._part_bytes = folder, part_bytes
        self._held = bytearray()

    def write(self, data: bytes) -> int:
        self._held += data
        while len(self._held) >= self._part_bytes:
            self._write_part(self._part_bytes)
        return len(data)

    def finish(self) -> None:
        if self._held:
            self._write_part(len(self._held))

    def _write_part(self, size: int) -> None:
        path = self._folder / f"part-{len(self.written):03}"
        path.write_bytes(self._held[:size])
        del self._held[:size]
        self.written.append(path)


class _PartReader(io.RawIOBase):
    """Several files read as one."""

    def __init__(self, paths: Iterator[Path]) -> None:
        self._chunks = (chunk for path in paths for chunk in _chunks(path))
        self._left = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self._left = self._left or next(self._chunks, b"")
        count = min(len(buffer), len(self._left))
        buffer[:count] = self._left[:count]
        self._left = self._left[count:]
        return count


def _chunks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            yield chunk


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _without_caches(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    return None if "__pycache__" in Path(member.name).parts else member


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    packing = commands.add_parser("pack", help="write a folder as parts")
    packing.add_argument("folder", type=Path)
    packing.add_argument("parts", type=Path)
    packing.add_argument("--part-mib", type=int, default=55, help="size of a part (default: 55)")
    unpacking = commands.add_parser("unpack", help="check and join the parts")
    unpacking.add_argument("parts", type=Path)
    unpacking.add_argument("folder", type=Path)
    args = parser.parse_args(argv)
    if args.command == "pack":
        for path in pack(args.folder, args.parts, args.part_mib << 20):
            print(f"{path}: {path.stat().st_size / (1 << 20):.1f} MiB")
        return 0
    try:
        unpack(args.parts, args.folder)
    except ParcelError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
