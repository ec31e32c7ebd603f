"""`BatchService`: accepts batches and completes them, also across restarts of the server."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from octavo.server.batch import record
from octavo.server.batch.execute import LineExecutor
from octavo.server.batch.files import FileStore
from octavo.server.batch.journal import try_to_write
from octavo.server.batch.lines import Input, scan
from octavo.server.batch.record import Batch
from octavo.server.batch.store import SYNC_S, BatchStore, FolderInUseError
from octavo.server.errors import ApiError

logger = logging.getLogger("octavo.server.batch")

T = TypeVar("T")

_SWEEP_S = 60.0
_AFTER_FAULT_S = 10.0


class BatchService:
    """Runs all batches.

    Args:
        folder: for all data; created with the first file.
        concurrency: lines that run at once, of all batches together.
        max_lines: limit per batch.
        max_line_bytes: limit per line.
        now: seconds since 1970.

    Attributes:
        answered: lines run so far, by outcome: success ("completed") or not ("failed").
    """

    def __init__(
        self,
        folder: Path,
        executor: LineExecutor,
        *,
        concurrency: int,
        max_lines: int,
        max_line_bytes: int,
        now: Callable[[], float] = time.time,
    ) -> None:
        self.executor = executor
        self.answered: Counter[str] = Counter({"completed": 0, "failed": 0})
        self._folder = folder
        self._seats = asyncio.Semaphore(concurrency)
        self._max_lines = max_lines
        self._max_line_bytes = max_line_bytes
        self._now = now
        self._disk = ThreadPoolExecutor(1, thread_name_prefix="octavo-batch")
        self._store: BatchStore | None = None
        self._opening = asyncio.Lock()
        self._jobs: dict[str, asyncio.Task[None]] = {}
        self._cancels: dict[str, asyncio.Event] = {}
        self._upkeep: asyncio.Task[None] | None = None
        self._stopped = False

    async def start(self) -> None:
        """Resume the batches of an earlier server."""
        if not self._folder.exists():
            return
        try:
            await self._opened()
        except ApiError as exc:
            logger.warning("Files and batches are not served for now: %s", exc)

    async def stop(self) -> None:
        """Stop all work; the next server resumes it."""
        self._stopped = True
        tasks = [*self._jobs.values(), *([self._upkeep] if self._upkeep else [])]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        store, self._store = self._store, None
        if store is not None:
            await self.on_disk(store.close)
        self._disk.shutdown()

    async def on_disk(self, work: Callable[[], T]) -> T:
        """Return the result of blocking disk work. Calls run one at a time, in order."""
        return await asyncio.get_running_loop().run_in_executor(self._disk, work)

    async def durably(self, work: Callable[[], T]) -> T:
        """Like `on_disk`, for work that a client waits for.

        Raises:
            ApiError: 507, it could not be written.
        """
        try:
            return await self.on_disk(work)
        except OSError as exc:
            raise ApiError(507, f"This can't be stored: {exc.strerror or exc}. Free space on the disk.") from exc

    async def files(self) -> FileStore:
        """Return the file store, opened on first use.

        Raises:
            ApiError: 503, the folder can't be used.
        """
        return (await self._opened()).files

    @property
    def active(self) -> int:
        """Number of batches that have not ended."""
        return len(self._jobs)

    async def create(
        self,
        input_file_id: str,
        endpoint: str,
        window: str,
        window_s: int,
        *,
        metadata: dict[str, str] | None = None,
        output_lifetime_s: int | None = None,
    ) -> Batch:
        """Accept a batch, durably. Its input is checked afterwards.

        Raises:
            ApiError: 400, the file's purpose is not batch; 404, there is no such file.
        """
        store = await self._opened()
        if store.files.get(input_file_id, "input_file_id").purpose != "batch":
            raise ApiError(400, "The input file's purpose must be 'batch'; upload it with that.", param="input_file_id")
        now = int(self._now())
        created = record.Created(
            id=f"batch_{secrets.token_hex(16)}",
            input_file_id=input_file_id,
            endpoint=endpoint,
            completion_window=window,
            created_at=now,
            expires_at=now + window_s,
            metadata=metadata,
            output_lifetime_s=output_lifetime_s,
        )
        batch = await self.durably(lambda: store.create(created))
        self._begin(store, batch)
        return batch

    async def get(self, batch_id: str) -> Batch:
        """Return a batch.

        Raises:
            ApiError: 404, there is no such batch.
        """
        batch = (await self._opened()).batches.get(batch_id)
        if batch is None:
            text = f"There is no batch {batch_id!r} here; GET /v1/batches lists those there are."
            raise ApiError(404, text, param="batch_id")
        return batch

    async def list(self) -> list[Batch]:
        """Return all batches, newest first."""
        store = await self._opened()
        return sorted(store.batches.values(), key=lambda batch: (-batch.created.created_at, batch.id))

    async def cancel(self, batch_id: str) -> Batch:
        """Cancel a batch: running lines are aborted, the answers computed so far become its output.

        Raises:
            ApiError: 404, there is no such batch; 409, it has ended.
        """
        batch = await self.get(batch_id)
        store = await self._opened()
        event = self._cancels.get(batch_id)
        await self.durably(lambda: self._note_cancel(store, batch))
        if event is not None:
            event.set()
        return batch

    def _note_cancel(self, store: BatchStore, batch: Batch) -> None:
        """Record that a batch is cancelled. On the disk's thread, where it may have ended since the client asked."""
        if batch.ended or (batch.closing is not None and not batch.cancelled):
            raise ApiError(409, f"The batch is {batch.status} and can no longer be cancelled.", param="batch_id")
        if not batch.cancelled:
            store.note(batch, record.Cancelling(int(self._now())))

    async def delete_file(self, file_id: str) -> None:
        """Delete a file.

        Raises:
            ApiError: 404, there is no such file; 409, a batch is reading it.
        """
        store = await self._opened()
        store.files.get(file_id)
        if file_id in self._inputs(store):
            raise ApiError(409, "A batch that has not ended reads this file; cancel the batch first.", param="file_id")
        await self.durably(lambda: store.files.delete(file_id))

    async def _opened(self) -> BatchStore:
        async with self._opening:
            if self._stopped:
                raise ApiError(503, "The server is shutting down; its batches resume when it is started again.")
            if self._store is None:
                store = BatchStore(self._folder, now=self._now)
                try:
                    await self.on_disk(store.open)
                except FolderInUseError:
                    text = f"Another server uses the folder {self._folder}; start this one with its own --jobs-dir."
                    raise ApiError(503, text) from None
                except OSError as exc:
                    text = f"The folder for files and batches can't be used: {exc}. Choose another with --jobs-dir."
                    raise ApiError(503, text) from exc
                self._store = store
                self._upkeep = asyncio.create_task(self._keep_up(store))
                for batch in store.batches.values():
                    if not batch.ended:
                        logger.info("Batch %s resumes: %d lines are answered already.", batch.id, len(batch.answered))
                        self._begin(store, batch)
            return self._store

    def _begin(self, store: BatchStore, batch: Batch) -> None:
        self._cancels[batch.id] = asyncio.Event()
        if batch.cancelled:
            self._cancels[batch.id].set()
        self._jobs[batch.id] = asyncio.create_task(self._see_through(store, batch))

    async def _see_through(self, store: BatchStore, batch: Batch) -> None:
        """Process a batch until it has ended; wait while the disk is full."""
        while True:
            try:
                await self._work(store, batch)
                break
            except* OSError as faults:
                text = "Batch %s can't be stored (%s); it is tried again in %.0f s."
                logger.error(text, batch.id, _first(faults), _AFTER_FAULT_S)
            except* Exception:
                logger.exception("Batch %s failed; it is tried again in %.0f s.", batch.id, _AFTER_FAULT_S)
            await self._room()
        logger.info("Batch %s is %s: %s", batch.id, batch.status, batch.told()["request_counts"])
        del self._jobs[batch.id], self._cancels[batch.id]

    async def _room(self) -> None:
        """Wait a while, and until the disk has space: answers that can't be stored would be computed in vain."""
        while True:
            await asyncio.sleep(_AFTER_FAULT_S)
            try:
                await self.on_disk(lambda: try_to_write(self._folder))
                return
            except OSError:
                pass

    async def _work(self, store: BatchStore, batch: Batch) -> None:
        lines = await self._validate(store, batch)
        if lines is None:
            return
        if batch.closing is None:
            await self._run_lines(store, batch, lines)
        # After answers already queued for the journal.
        await self.on_disk(lambda: store.finish(batch, self._outcome(batch), lines))

    def _outcome(self, batch: Batch) -> str:
        if batch.cancelled:
            return record.CANCELLED
        return record.COMPLETED if len(batch.answered) == batch.total else record.EXPIRED

    async def _validate(self, store: BatchStore, batch: Batch) -> Input | None:
        """Return the lines; None, with the errors recorded, if the input is invalid."""
        fresh = not batch.total
        found = await asyncio.to_thread(
            scan,
            store.files.content(batch.created.input_file_id),
            [batch.created.endpoint],
            max_lines=self._max_lines if fresh else batch.total,
            max_line_bytes=self._max_line_bytes,
        )
        now = int(self._now())
        if not isinstance(found, Input):
            await self.on_disk(lambda: store.refuse(batch, record.Refused(now, found)))
            return None
        if fresh:
            await self.on_disk(lambda: store.note(batch, record.Begun(now, len(found))))
        return found

    async def _run_lines(self, store: BatchStore, batch: Batch, lines: Input) -> None:
        """Run the unanswered lines until all are answered, the batch is cancelled, or it expires."""
        work = asyncio.create_task(self._run_all(store, batch, lines))
        cancel = asyncio.create_task(self._cancels[batch.id].wait())
        left = max(0.0, batch.created.expires_at - self._now())
        try:
            await asyncio.wait({work, cancel}, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()
        finally:
            work.cancel()
            cancel.cancel()
            await asyncio.wait({work, cancel})

    async def _run_all(self, store: BatchStore, batch: Batch, lines: Input) -> None:
        open_lines = [number for number in range(len(lines)) if number not in batch.answered]
        async with asyncio.TaskGroup() as group:
            for number in open_lines:
                await self._seats.acquire()
                task = group.create_task(self._run_line(store, batch, lines, number))
                task.add_done_callback(lambda _: self._seats.release())  # also if it never began

    async def _run_line(self, store: BatchStore, batch: Batch, lines: Input, number: int) -> None:
        result = await self.executor.run(lines.read(number))
        await self.on_disk(lambda: store.answer(batch, number, result))
        self.answered["completed" if result.ok else "failed"] += 1

    def _inputs(self, store: BatchStore) -> frozenset[str]:
        return frozenset(store.batches[name].created.input_file_id for name in self._jobs)

    async def _keep_up(self, store: BatchStore) -> None:
        """Sync the journals, and periodically remove expired files."""
        swept = 0.0
        while True:
            try:
                await self.on_disk(store.sync)
                if time.monotonic() - swept > _SWEEP_S:
                    await self.on_disk(lambda: store.files.sweep(keep=self._inputs(store)))
                    swept = time.monotonic()
            except OSError as exc:
                logger.error("Batches can't be written to the disk: %s", exc)
            await asyncio.sleep(SYNC_S)


def _first(fault: BaseException) -> BaseException:
    """Return one exception of a group: a full disk fails every line in the same way."""
    while isinstance(fault, BaseExceptionGroup):
        fault = fault.exceptions[0]
    return fault
