"""The records of a batch's journal, and `Batch`, the state that they define."""

from __future__ import annotations

from typing import Any

import msgspec

from octavo.server.batch.lines import Problem

VALIDATING, IN_PROGRESS, FINALIZING, CANCELLING = "validating", "in_progress", "finalizing", "cancelling"
COMPLETED, FAILED, CANCELLED, EXPIRED = "completed", "failed", "cancelled", "expired"


class Created(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="created"):
    """The batch was accepted. Times are in seconds since 1970."""

    id: str
    input_file_id: str
    endpoint: str
    completion_window: str
    created_at: int
    expires_at: int
    metadata: dict[str, str] | None = None
    output_lifetime_s: int | None = None


class Begun(msgspec.Struct, frozen=True, tag_field="kind", tag="begun"):
    """Its input is valid."""

    at: int
    total: int


class Refused(msgspec.Struct, frozen=True, tag_field="kind", tag="refused"):
    """Its input is invalid."""

    at: int
    problems: list[Problem]


class Answered(msgspec.Struct, frozen=True, tag_field="kind", tag="answered"):
    """A line has its result, in the same form as in the output."""

    line: int
    ok: bool
    result: msgspec.Raw


class Cancelling(msgspec.Struct, frozen=True, tag_field="kind", tag="cancelling"):
    """Cancellation was requested."""

    at: int


class Closing(msgspec.Struct, frozen=True, tag_field="kind", tag="closing"):
    """No more lines are run; the outputs get these ids. None for an empty output."""

    at: int
    outcome: str
    completed: int
    failed: int
    output_file_id: str | None
    error_file_id: str | None


class Ended(msgspec.Struct, frozen=True, tag_field="kind", tag="ended"):
    """The outputs are complete."""

    at: int


JournalRecord = Created | Begun | Refused | Answered | Cancelling | Closing | Ended

encode = msgspec.json.Encoder().encode
decode = msgspec.json.Decoder(JournalRecord).decode


class Batch:
    """The state of one batch.

    Attributes:
        answered: line -> offset and length of its record in the journal, and whether it succeeded.
    """

    def __init__(self, created: Created) -> None:
        self.created = created
        self.status = VALIDATING
        self.total = 0
        self.completed = 0
        self.failed = 0
        self.answered: dict[int, tuple[int, int, bool]] = {}
        self.closing: Closing | None = None
        self._times: dict[str, int] = {}
        self._problems: list[Problem] = []

    @property
    def id(self) -> str:
        return self.created.id

    @property
    def ended(self) -> bool:
        return self.status in (COMPLETED, FAILED, CANCELLED, EXPIRED)

    @property
    def cancelled(self) -> bool:
        return CANCELLING in self._times

    def take(self, record: JournalRecord, place: int, size: int) -> None:
        """Apply a record, at offset `place` in the journal. If a line has two answers, the first counts."""
        match record:
            case Begun(at, total):
                self._times[IN_PROGRESS] = at
                self.status = CANCELLING if self.cancelled else IN_PROGRESS
                self.total = total
            case Refused(at, problems):
                self._enter(FAILED, at)
                self._problems = problems
            case Answered(line, ok, _) if line not in self.answered:
                self.answered[line] = place, size, ok
                self.completed += ok
                self.failed += not ok
            case Cancelling(at):
                self._enter(CANCELLING, at)
            case Closing(at):
                self.closing = record
                self.completed, self.failed = record.completed, record.failed
                self._enter(CANCELLING if record.outcome == CANCELLED else FINALIZING, self._times.get(CANCELLING, at))
            case Ended(at):
                assert self.closing is not None
                self._enter(self.closing.outcome, at)
                self.answered = {}

    def summary(self) -> list[JournalRecord]:
        """Return the records that an ended batch still needs: all except the answers, which are in its output files."""
        records: list[JournalRecord] = [self.created]
        if IN_PROGRESS in self._times:
            records.append(Begun(self._times[IN_PROGRESS], self.total))
        if self._problems:
            records.append(Refused(self._times[FAILED], self._problems))
        if CANCELLING in self._times:
            records.append(Cancelling(self._times[CANCELLING]))
        if self.closing is not None:
            records += [self.closing, Ended(self._times[self.closing.outcome])]
        return records

    def told(self) -> dict[str, Any]:
        """Return the batch in the form of OpenAI's API."""
        created, closing = self.created, self.closing if self.ended else None
        errors = {"object": "list", "data": self._problems} if self._problems else None
        return {
            "id": created.id,
            "object": "batch",
            "endpoint": created.endpoint,
            "errors": errors,
            "input_file_id": created.input_file_id,
            "completion_window": created.completion_window,
            "status": self.status,
            "output_file_id": closing and closing.output_file_id,
            "error_file_id": closing and closing.error_file_id,
            "created_at": created.created_at,
            "in_progress_at": self._times.get(IN_PROGRESS),
            "expires_at": created.expires_at,
            "finalizing_at": self._times.get(FINALIZING),
            "completed_at": self._times.get(COMPLETED),
            "failed_at": self._times.get(FAILED),
            "expired_at": self._times.get(EXPIRED),
            "cancelling_at": self._times.get(CANCELLING),
            "cancelled_at": self._times.get(CANCELLED),
            "request_counts": {"total": self.total, "completed": self.completed, "failed": self.failed},
            "metadata": created.metadata,
        }

    def _enter(self, status: str, at: int) -> None:
        self.status = status
        self._times[status] = at
