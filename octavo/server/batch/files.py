"""`FileStore`: uploaded files and batch outputs, in a folder on disk.

A file is stored as `ID.data` and `ID.json`, its metadata. The latter is written last and removed first, so a file
exists completely or not at all.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from octavo.server.batch.journal import sync_folder, write_durably
from octavo.server.errors import ApiError

_DATA, _FACTS = ".data", ".json"


class FileObject(msgspec.Struct, frozen=True, kw_only=True):
    """A file in the form of OpenAI's API. Times are in seconds since 1970."""

    id: str
    object: str = "file"
    bytes: int
    created_at: int
    expires_at: int | None = None
    filename: str
    purpose: str
    status: str = "processed"
    status_details: str | None = None


def new_file_id() -> str:
    return f"file-{secrets.token_hex(16)}"


class FileStore:
    """Methods that write are durable and take milliseconds: call them off the event loop.

    Args:
        folder: created by `load`.
    """

    def __init__(self, folder: Path, *, now: Callable[[], float] = time.time) -> None:
        self._folder = folder
        self._now = now
        self._files: dict[str, FileObject] = {}

    def load(self) -> None:
        """Read the stored files. Remove leftovers of interrupted writes."""
        self._folder.mkdir(parents=True, exist_ok=True)
        for path in sorted(self._folder.glob(f"*{_FACTS}")):
            facts = msgspec.json.decode(path.read_bytes(), type=FileObject)
            self._files[facts.id] = facts
        for path in self._folder.iterdir():
            if path.suffix not in (_DATA, _FACTS) or path.stem not in self._files:
                path.unlink()

    def put(self, file_id: str, *, filename: str, purpose: str, lifetime_s: int | None = None) -> FileObject:
        """Store the content of `draft(file_id)`, replacing a file of that id.

        Args:
            lifetime_s: seconds until the file expires; None for never.
        """
        draft = self.draft(file_id)
        with draft.open("r+b") as file:
            os.fsync(file.fileno())
            size = file.seek(0, os.SEEK_END)
        now = int(self._now())
        facts = FileObject(
            id=file_id,
            bytes=size,
            created_at=now,
            expires_at=None if lifetime_s is None else now + lifetime_s,
            filename=filename,
            purpose=purpose,
        )
        draft.replace(self.content(file_id))
        write_durably(self._folder / f"{file_id}{_FACTS}", msgspec.json.encode(facts))
        self._files[file_id] = facts
        return facts

    def draft(self, file_id: str) -> Path:
        """Return the path to write content to before `put`."""
        return self._folder / f"{file_id}.draft"

    def get(self, file_id: str, param: str = "file_id") -> FileObject:
        """Return a file's metadata.

        Raises:
            ApiError: 404, there is no such file, or it has expired.
        """
        facts = self._files.get(file_id)
        if facts is None or self._expired(facts):
            raise ApiError(404, f"There is no file {file_id!r} here; GET /v1/files lists those there are.", param=param)
        return facts

    def content(self, file_id: str) -> Path:
        """Return the path of a file's content."""
        return self._folder / f"{file_id}{_DATA}"

    def list(self) -> list[FileObject]:
        """Return all files, newest first."""
        alive = [facts for facts in self._files.values() if not self._expired(facts)]
        return sorted(alive, key=lambda facts: (-facts.created_at, facts.id))

    def delete(self, file_id: str) -> None:
        """Delete a file.

        Raises:
            ApiError: 404, there is no such file.
        """
        self.get(file_id)
        self._remove(file_id)

    def sweep(self, *, keep: frozenset[str] = frozenset()) -> None:
        """Remove expired files, except those in `keep`."""
        for facts in list(self._files.values()):
            if self._expired(facts) and facts.id not in keep:
                self._remove(facts.id)

    def _remove(self, file_id: str) -> None:
        del self._files[file_id]
        (self._folder / f"{file_id}{_FACTS}").unlink(missing_ok=True)
        sync_folder(self._folder)
        self.content(file_id).unlink(missing_ok=True)

    def _expired(self, facts: FileObject) -> bool:
        return facts.expires_at is not None and facts.expires_at <= self._now()
