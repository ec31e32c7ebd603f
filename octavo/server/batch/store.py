"""`BatchStore`: files, batches and their journals, in one folder that belongs to one server at a time.

    FOLDER/lock                 held while a server uses the folder
    FOLDER/files/               the `FileStore`
    FOLDER/batches/ID.journal   one per batch; shortened to a summary when the batch has ended

Durability (fsync): an uploaded file before its upload is answered; creation, cancellation and end of a batch before
they are reported; answers of lines within `SYNC_S` seconds, and always before the output exists. A killed server loses
nothing that it wrote; after a power failure, lines whose answers were lost are run again.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from octavo.server.batch import record
from octavo.server.batch.execute import LineResult, expired
from octavo.server.batch.files import FileStore, new_file_id
from octavo.server.batch.journal import Journal, write_durably
from octavo.server.batch.lines import Input
from octavo.server.batch.record import Batch, JournalRecord

SYNC_S = 1.0


class FolderInUseError(Exception):
    """Another server uses the folder."""


class BatchStore:
    """All data on disk. Methods block: call them off the event loop, and those of one batch one at a time."""

    def __init__(self, folder: Path, *, now: Callable[[], float] = time.time) -> None:
        self.folder = folder
        self.files = FileStore(folder / "files", now=now)
        self.batches: dict[str, Batch] = {}
        self._journals: dict[str, Journal] = {}
        self._now = now
        self._held = contextlib.ExitStack()

    def open(self) -> None:
        """Lock the folder, created if missing, and read its content.

        Raises:
            FolderInUseError: another server uses it.
            OSError: it can't be created, read or written.
        """
        (self.folder / "batches").mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as held:
            held.enter_context(_locked(self.folder / "lock"))
            self.files.load()
            for path in sorted((self.folder / "batches").glob("*.journal")):
                self._load(path)
            self._held = held.pop_all()

    def close(self) -> None:
        for journal in self._journals.values():
            journal.sync()
            journal.close()
        self._journals = {}
        self._held.close()

    def create(self, created: record.Created) -> Batch:
        """Create a batch, durably."""
        batch = Batch(created)
        path = self._path(batch.id)
        journal = Journal.open(path, lambda line, place: None)
        try:
            journal.append(record.encode(created))
            journal.sync()
        except OSError:
            journal.close()
            path.unlink()
            raise
        self._journals[batch.id] = journal
        self.batches[batch.id] = batch
        return batch

    def note(self, batch: Batch, entry: JournalRecord) -> None:
        """Append a record to a batch's journal, durably."""
        self._add(batch, entry)
        self._journals[batch.id].sync()

    def answer(self, batch: Batch, number: int, result: LineResult) -> None:
        """Append a line's answer; `sync` makes it durable."""
        if number not in batch.answered:
            self._add(batch, record.Answered(number, result.ok, msgspec.Raw(msgspec.json.encode(result))))

    def sync(self) -> None:
        """Make all appended records durable."""
        for journal in list(self._journals.values()):
            journal.sync()

    def refuse(self, batch: Batch, entry: record.Refused) -> None:
        """End a batch whose input is invalid."""
        self.note(batch, entry)
        self._shorten(batch)

    def finish(self, batch: Batch, outcome: str, lines: Input) -> None:
        """Write the outputs and end the batch. Idempotent after an interruption.

        Args:
            outcome: COMPLETED, CANCELLED or EXPIRED; unanswered lines of an expired batch get an error.
        """
        if batch.closing is None:
            late = len(lines) - len(batch.answered) if outcome == record.EXPIRED else 0
            failed = batch.failed + late
            closing = record.Closing(
                int(self._now()),
                outcome,
                batch.completed,
                failed,
                new_file_id() if batch.completed else None,
                new_file_id() if failed else None,
            )
            self.note(batch, closing)
        assert batch.closing is not None
        self._write_outputs(batch, batch.closing, lines)
        self.note(batch, record.Ended(int(self._now())))
        self._shorten(batch)

    def _write_outputs(self, batch: Batch, closing: record.Closing, lines: Input) -> None:
        """Write results in the order of the input: successes to one file, errors to another."""
        with contextlib.ExitStack() as open_files:
            drafts = {}
            for ok, file_id in ((True, closing.output_file_id), (False, closing.error_file_id)):
                if file_id is not None:
                    drafts[ok] = open_files.enter_context(self.files.draft(file_id).open("wb")), file_id
            for number in range(len(lines)):
                if number in batch.answered:
                    ok, result = self._answer(batch, number)
                elif closing.outcome == record.EXPIRED:
                    ok, result = False, msgspec.json.encode(expired(lines.read(number)))
                else:
                    continue
                drafts[ok][0].write(result + b"\n")
        for ok, (_, file_id) in drafts.items():
            self.files.put(
                file_id,
                filename=f"{batch.id}_{'output' if ok else 'error'}.jsonl",
                purpose="batch_output",
                lifetime_s=batch.created.output_lifetime_s,
            )

    def _answer(self, batch: Batch, number: int) -> tuple[bool, bytes]:
        place, size, ok = batch.answered[number]
        entry = record.decode(self._journals[batch.id].read(place, size))
        assert isinstance(entry, record.Answered)
        return ok, bytes(entry.result)

    def _add(self, batch: Batch, entry: JournalRecord) -> None:
        data = record.encode(entry)
        place = self._journals[batch.id].append(data)
        batch.take(entry, place, len(data))

    def _load(self, path: Path) -> None:
        found: list[Batch] = []

        def take(line: bytes, place: int) -> None:
            entry = record.decode(line)
            if isinstance(entry, record.Created):
                found.append(Batch(entry))
            else:
                found[0].take(entry, place, len(line) - 1)

        journal = Journal.open(path, take)
        if not found:  # its creation was interrupted before the client got its id
            journal.close()
            path.unlink()
            return
        (batch,) = found
        self.batches[batch.id] = batch
        self._journals[batch.id] = journal
        if batch.ended:
            self._shorten(batch)

    def _shorten(self, batch: Batch) -> None:
        """Replace the journal of an ended batch by its summary."""
        self._journals.pop(batch.id).close()
        summary = b"".join(record.encode(entry) + b"\n" for entry in batch.summary())
        path = self._path(batch.id)
        if path.stat().st_size != len(summary):
            write_durably(path, summary)

    def _path(self, batch_id: str) -> Path:
        return self.folder / "batches" / f"{batch_id}.journal"


def _locked(path: Path) -> contextlib.AbstractContextManager[object]:
    """Lock a file between processes; leaving the returned context releases it, from any thread.

    Raises:
        FolderInUseError: another process holds the lock. The kernel releases that of a dead process.
    """
    from filelock import FileLock, Timeout

    try:
        return FileLock(path, thread_local=False).acquire(blocking=False)
    except Timeout:
        raise FolderInUseError from None
