"""Folders that Octavo writes to, and the free space in them."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from octavo.cli.doctor.check import Area, Check, Finding, Wish, broken, fine, warning
from octavo.cli.flags.units import show_bytes
from octavo.hub.cache import cache_dir, data_dir, kernel_dir

_GIB = 1 << 30
_KERNEL_ROOM = 256 << 20
_MODEL_ROOM = 2 * _GIB
_SOME_ROOM = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Folder:
    """A folder, or where it will be made.

    Attributes:
        existing: it, or the nearest folder above it that exists.
        writable: files can be made in `existing`.
        executes: libraries in it can be loaded (it is not mounted with noexec).
        free: bytes.
    """

    path: Path
    existing: Path
    writable: bool
    executes: bool
    free: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Folders:
    """The folders of kernels (Octavo's, and Triton's), downloaded models (Octavo's, and the hub's), jobs and temporary
    files. Downloads have one if --download-dir names it."""

    kernels: Folder
    triton: Folder
    models: tuple[Folder, ...]
    jobs: Folder
    temporary: Folder | None


def read(wish: Wish) -> Folders:
    download = wish.engine.model.download_dir
    models = [Path(download).expanduser()] if download else [cache_dir() / "models", hub_cache()]
    jobs = Path(wish.server.jobs_dir).expanduser() if wish.server.jobs_dir else data_dir() / "jobs"
    return Folders(
        kernels=look_at(kernel_dir()),
        triton=look_at(Path(os.environ.get("TRITON_CACHE_DIR") or Path.home() / ".triton" / "cache")),
        models=tuple(look_at(path) for path in models),
        jobs=look_at(jobs),
        temporary=_temporary(),
    )


def hub_cache() -> Path:
    """Return the hub library's cache folder, without importing the library: its documented variables."""
    own, home = os.environ.get("HF_HUB_CACHE"), os.environ.get("HF_HOME")
    if own:
        return Path(own).expanduser()
    shared = os.environ.get("XDG_CACHE_HOME")
    base = Path(shared).expanduser() if shared else Path.home() / ".cache"
    return (Path(home).expanduser() if home else base / "huggingface") / "hub"


def look_at(path: Path) -> Folder:
    existing = next(one for one in (path, *path.absolute().parents) if one.exists())
    return Folder(
        path=path,
        existing=existing,
        writable=existing.is_dir() and os.access(existing, os.W_OK | os.X_OK),
        executes=not os.statvfs(existing).f_flag & getattr(os, "ST_NOEXEC", 0),
        free=shutil.disk_usage(existing).free,
    )


def _temporary() -> Folder | None:
    try:
        return look_at(Path(tempfile.gettempdir()))
    except FileNotFoundError:  # no folder of those that Python tries can be written to
        return None


def judge_kernels(found: Folders) -> Finding:
    return _judge(
        found.kernels,
        room=_KERNEL_ROOM,
        why="kernels are compiled again at each start",
        remedy="set OCTAVO_KERNEL_CACHE to a folder that can be written to, and keep it between starts",
        loads=True,
    )


def judge_triton(found: Folders) -> Finding:
    return _judge(
        found.triton,
        room=_KERNEL_ROOM,
        why="kernels of GPUs can't be kept, or not compiled at all",
        remedy="set TRITON_CACHE_DIR to a folder that can be written to, with free space",
        loads=True,
    )


def judge_models(found: Folders) -> Finding:
    return _first(
        [
            _judge(
                folder,
                room=_MODEL_ROOM,
                why="models can't be downloaded there",
                remedy="free some space, or choose another folder: --download-dir, or OCTAVO_CACHE and HF_HOME",
            )
            for folder in found.models
        ]
    )


def judge_jobs(found: Folders) -> Finding:
    return _judge(
        found.jobs,
        room=_SOME_ROOM,
        why="files and batches can't be uploaded",
        remedy="set --jobs-dir, or OCTAVO_DATA, to a folder that can be written to, with free space",
    )


def judge_temporary(found: Folders) -> Finding:
    remedy = "set TMPDIR to a folder that can be written to, or mount one at /tmp"
    if found.temporary is None:
        return broken("no folder for temporary files can be written to; the server's processes talk there", remedy)
    judged = _judge(found.temporary, room=_SOME_ROOM, why="the server's processes talk there", remedy=remedy)
    return judged if found.temporary.writable else broken(judged.text, remedy)


def _judge(folder: Folder, *, room: int, why: str, remedy: str, loads: bool = False) -> Finding:
    if not folder.writable:
        return warning(f"{folder.existing} can't be written to: {why}", remedy)
    if folder.free < room:
        return warning(f"{folder.existing} has {show_bytes(folder.free)} left: {why}", remedy)
    if loads and not folder.executes:
        return warning(f"{folder.existing} is mounted with noexec, so kernels in it can't be loaded", remedy)
    return fine(f"{folder.path} ({show_bytes(folder.free)} free)")


def _first(findings: Sequence[Finding]) -> Finding:
    """Return the first finding that is not fine, else all of them as one."""
    wrong = next((one for one in findings if one.remedy), None)
    return wrong or fine("; ".join(one.text for one in findings))


AREA = Area(
    "folders",
    read,
    (
        Check("kernels", judge_kernels),
        Check("Triton's kernels", judge_triton),
        Check("models", judge_models),
        Check("jobs", judge_jobs),
        Check("temporary files", judge_temporary),
    ),
)
