"""Records of runs: every plan, payload and output of an engine in one file, to be replayed elsewhere.

The file is a stream of length-prefixed MessagePack records (`frames.py`): a `Header`, then for each step `Planned`,
`Sampled` and `Gave`, in the order in which the engine called its executor. A truncated file is valid.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol

import msgspec

from octavo.core.errors import ConfigError
from octavo.core.output import StepOutput
from octavo.core.plan import StepPlan
from octavo.core.spans import Spans
from octavo.core.worker_info import CacheSizes, WorkerFacts
from octavo.engine.executor import AnyExecutor, LaunchedStep
from octavo.engine.frames import Frames, frame
from octavo.engine.plan_codec import PlanCodec

log = logging.getLogger(__name__)

FORM = 1
_PIECE = 1 << 20


class Header(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """All that is needed to build the same worker again.

    Attributes:
        form: version of the file format; a reader supports one.
        version: Octavo's version that wrote the file.
        config: the engine's settings.
        facts: the device and the model.
        sizes: the worker's allocations.
    """

    form: int
    version: str
    config: dict[str, Any]
    facts: WorkerFacts
    sizes: CacheSizes


class Planned(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A step was launched.

    Attributes:
        names: slot -> request id and choice of a request that takes the slot with this step.
        plan: encoded by a `PlanCodec`.
    """

    names: dict[int, str]
    plan: bytes


class Sampled(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The step was sampled, with this payload."""

    step: int
    payload: bytes


class Gave(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The step's output was read; None if the step failed."""

    step: int
    output: StepOutput | None


Record = Header | Planned | Sampled | Gave
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Record).decode


class Recorder(Protocol):
    """Watches the steps of an engine."""

    def around(self, executor: AnyExecutor, names_of: Callable[[StepPlan], dict[int, str]]) -> AnyExecutor:
        """Return an executor that records the calls and outputs of this one.

        Args:
            names_of: returns slot -> name of the requests that take slots with a plan.
        """
        ...

    def stop(self, why: str) -> None:
        """Stop recording for this reason."""
        ...

    def close(self) -> None:
        """The engine has ended."""
        ...


class PlanRecorder:
    """Writes a record, up to a limit. If it can't be continued, recording stops and the engine continues.

    Args:
        path: the file; it is overwritten.
        limit: largest size of the file, in bytes.
        header: first record of the file.
        codec: encodes plans and payloads.

    Raises:
        ConfigError: the file can't be written.
    """

    def __init__(self, path: Path, limit: int, header: Header, codec: PlanCodec) -> None:
        self._path = path
        self._left = limit
        self._codec = codec
        try:
            self._file: IO[bytes] | None = path.open("wb")
        except OSError as exc:
            raise ConfigError(f"--record-steps {path} can't be written ({exc.strerror}); choose another file.") from exc
        self._write(header)

    def around(self, executor: AnyExecutor, names_of: Callable[[StepPlan], dict[int, str]]) -> AnyExecutor:
        return _Recorded(executor, self, names_of)

    def planned(self, plan: StepPlan, names: dict[int, str]) -> None:
        if self._file is not None:
            self._write(Planned(names, self._codec.encode_plan(plan)))

    def sampled(self, step: int, payload: Mapping[str, Any]) -> None:
        if self._file is not None:
            self._write(Sampled(step, self._codec.encode_payload(payload)))

    def gave(self, step: int, output: StepOutput | None) -> None:
        if self._file is not None:
            self._write(Gave(step, output))

    def stop(self, why: str) -> None:
        """Stop recording, and log the reason."""
        if self._file is not None:
            log.warning("recording steps in %s stops here: %s", self._path, why)
            self.close()

    def close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(OSError):  # closing writes what is buffered, which fails again on a full disk
                file.close()

    def _write(self, record: Record) -> None:
        data = frame(_encode(record))
        self._left -= len(data)
        if self._file is None or self._left < 0:
            self.stop("the file has reached its limit (--record-steps-limit)")
            return
        try:
            self._file.write(data)
            self._file.flush()  # the process may end in the current step
        except OSError as exc:
            self.stop(f"the file can't be written ({exc.strerror})")


class _Recorded:
    """An `Executor` that records the calls of another."""

    def __init__(
        self, executor: AnyExecutor, recorder: PlanRecorder, names_of: Callable[[StepPlan], dict[int, str]]
    ) -> None:
        self._executor = executor
        self._recorder = recorder
        self._names_of = names_of

    def forward(self, plan: StepPlan) -> _RecordedStep:
        self._recorder.planned(plan, self._names_of(plan))
        return _RecordedStep(self._executor.forward(plan), self._recorder)

    def sample(self, step: LaunchedStep, payload: dict[str, Any]) -> None:
        assert isinstance(step, _RecordedStep)
        self._recorder.sampled(step.plan.id, payload)
        self._executor.sample(step.inner, payload)

    def watch(self, spans: Spans) -> None:
        self._executor.watch(spans)


@dataclass(slots=True)
class _RecordedStep:
    inner: LaunchedStep
    recorder: PlanRecorder

    @property
    def plan(self) -> StepPlan:
        return self.inner.plan

    def result(self) -> StepOutput:
        try:
            output = self.inner.result()
        except Exception:
            self.recorder.gave(self.plan.id, None)
            raise
        self.recorder.gave(self.plan.id, output)
        return output


def read_records(path: Path) -> tuple[Header, Iterator[Planned | Sampled | Gave]]:
    """Return a file's header and an iterator over its records.

    Raises:
        ConfigError: the file can't be read, or is not a record of a supported form.
    """
    try:
        records = _records(path)
        first = next(records, None)
    except OSError as exc:
        raise ConfigError(f"{path} can't be read ({exc.strerror}).") from exc
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise ConfigError(f"{path} is not a record of steps: {exc}. Make one with --record-steps.") from exc
    if not isinstance(first, Header) or first.form != FORM:
        form = f"has form {first.form}" if isinstance(first, Header) else "does not begin with a header"
        raise ConfigError(f"{path} {form}; this version of Octavo reads records of form {FORM}.")
    return first, (record for record in records if not isinstance(record, Header))


def _records(path: Path) -> Iterator[Record]:
    frames = Frames()
    with path.open("rb") as source:
        while data := source.read(_PIECE):
            for message in frames.take(data):
                yield _decode(message)
