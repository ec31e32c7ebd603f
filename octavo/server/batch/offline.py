"""A batch without a server: an input file, an output file, and a journal next to it until it is complete."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from octavo.core.errors import ConfigError
from octavo.server.batch import record
from octavo.server.batch.execute import LineExecutor
from octavo.server.batch.journal import Journal
from octavo.server.batch.lines import Input, scan

_SHOWN = 10
_WATCH_S = 0.5


class JournalSource(msgspec.Struct, frozen=True, tag_field="kind", tag="source"):
    """The input that a journal belongs to."""

    sha256: str


_decode = msgspec.json.Decoder(JournalSource | record.Answered).decode


@dataclass(slots=True)
class Tally:
    """Counts of a run.

    Attributes:
        resumed: lines that an earlier run had answered.
        outcomes: the others, "completed" or "failed".
    """

    total: int
    resumed: int
    outcomes: Counter[str] = field(default_factory=Counter)


def read_input(path: Path, executor: LineExecutor, *, max_lines: int, max_line_bytes: int) -> Input:
    """Read and check the input.

    Raises:
        ConfigError: the file can't be read, or has invalid lines; the text names them.
    """
    try:
        found = scan(path, executor.urls, max_lines=max_lines, max_line_bytes=max_line_bytes)
    except OSError as exc:
        raise ConfigError(f"the input {path} can't be read: {exc.strerror}") from exc
    if isinstance(found, Input):
        return found
    told = [f"line {one.line}: {one.message}" if one.line else one.message for one in found[:_SHOWN]]
    more = [f"and {len(found) - _SHOWN} more"] if len(found) > _SHOWN else []
    raise ConfigError(f"the input {path} can't be run: " + "\n  ".join([*told, *more]))


async def run_file(
    lines: Input,
    source: Path,
    output: Path,
    executor: LineExecutor,
    *,
    concurrency: int,
    ill: Callable[[], str | None],
    progress: Callable[[Tally], None] = lambda tally: None,
) -> Tally:
    """Answer every line and write the results to `output`, in the order of the input.

    Answers are appended to `OUTPUT.journal` as they arrive. If an interrupted run has left one, only missing lines are
    run.

    Args:
        source: identifies the input by its content, to match it with a journal.
        ill: the reason why the engine can't continue, or None; called periodically.
        progress: called after every answer.

    Raises:
        ConfigError: the journal belongs to another input, or output or journal can't be written.
    """
    path = output.with_name(output.name + ".journal")
    answered: dict[int, tuple[int, int]] = {}
    try:
        with contextlib.closing(_open(path, source, answered)) as journal:
            tally = Tally(len(lines), len(answered))
            work = _answer_all(lines, executor, journal, answered, tally, concurrency, progress)
            await _first(work, _watch(ill))
            _write(output, journal, [answered[number] for number in range(len(lines))])
    except OSError as exc:
        raise ConfigError(
            f"--output-file {output} can't be written ({exc.strerror or exc}). Make room there; the {len(answered)} "
            f"answers so far are in {path}, and the same command resumes from there."
        ) from exc
    path.unlink()
    return tally


async def _answer_all(
    lines: Input,
    executor: LineExecutor,
    journal: Journal,
    answered: dict[int, tuple[int, int]],
    tally: Tally,
    concurrency: int,
    progress: Callable[[Tally], None],
) -> None:
    """Answer the lines that are not in `answered` yet, where the place of each answer in the journal is added."""
    seats = asyncio.Semaphore(concurrency)

    async def answer(number: int) -> None:
        async with seats:
            result = await executor.run(lines.read(number))
        entry = record.encode(record.Answered(number, result.ok, msgspec.Raw(msgspec.json.encode(result))))
        answered[number] = journal.append(entry), len(entry)
        tally.outcomes["completed" if result.ok else "failed"] += 1
        progress(tally)

    try:
        async with asyncio.TaskGroup() as group:
            for number in range(len(lines)):
                if number not in answered:
                    group.create_task(answer(number))
    except ExceptionGroup as failed:
        if unwritten := failed.subgroup(OSError):  # one for each line that found the disk full
            raise unwritten.exceptions[0] from None
        raise


async def _watch(ill: Callable[[], str | None]) -> None:
    """Raise ConfigError once the engine can't continue."""
    while (reason := ill()) is None:
        await asyncio.sleep(_WATCH_S)
    raise ConfigError(f"{reason} The answers so far are kept; the same command resumes from there.")


async def _first(work: Coroutine[Any, Any, None], watch: Coroutine[Any, Any, None]) -> None:
    """Return when `work` is done; raise if `watch` raises first."""
    tasks = {asyncio.create_task(work), asyncio.create_task(watch)}
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


def _open(path: Path, source: Path, answered: dict[int, tuple[int, int]]) -> Journal:
    digest = hashlib.sha256(source.read_bytes()).hexdigest()
    found: list[str] = []

    def take(line: bytes, place: int) -> None:
        entry = _decode(line)
        if isinstance(entry, JournalSource):
            found.append(entry.sha256)
        else:
            answered.setdefault(entry.line, (place, len(line) - 1))

    journal = Journal.open(path, take)
    if found and found[0] != digest:
        journal.close()
        raise ConfigError(f"{path} holds the answers to another input; remove it, or choose another --output-file.")
    if not found:
        try:
            journal.append(record.encode(JournalSource(digest)))
        except OSError:
            journal.close()
            raise
    return journal


def _write(output: Path, journal: Journal, places: list[tuple[int, int]]) -> None:
    draft = output.with_name(output.name + ".part")
    with draft.open("wb") as file:
        for place, size in places:
            entry = _decode(journal.read(place, size))
            assert isinstance(entry, record.Answered)
            file.write(bytes(entry.result) + b"\n")
    draft.replace(output)
