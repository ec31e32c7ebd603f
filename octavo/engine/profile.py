"""`Profiler`: a trace of an engine's steps, for https://ui.perfetto.dev and chrome://tracing.

Format: Google's "Trace Event Format", which torch's profiler writes too; the engine's spans are added to its file.
"""

from __future__ import annotations

import gzip
import json
import logging
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, Any

from octavo.core.errors import ConfigError, EngineStateError, InvalidRequestError
from octavo.core.output import TokenDelta
from octavo.core.plan import StepPlan
from octavo.core.profiling import ProfileSettings
from octavo.core.spans import Span, Spans
from octavo.engine.executor import Tracer

log = logging.getLogger(__name__)

_PREFIX = re.compile(r"[\w.-]{0,100}", re.ASCII)
_HEAD = 1 << 16  # characters; a trace's header is shorter
_BASE = re.compile(r'"baseTimeNanoseconds":\s*(\d+)')
_EVENTS = re.compile(r'"traceEvents":\s*\[')
_ROWS = ("steps", "kernels")

StepFunction = Callable[[], list[TokenDelta]]


class Profiler:
    """One profile at a time, of a bounded length."""

    def __init__(self, settings: ProfileSettings, tracer: Tracer) -> None:
        """
        Args:
            settings: folder, contents and limits of profiles.
            tracer: traces operations inside steps.

        Raises:
            ConfigError: the folder can't be written to.
        """
        self._settings = settings
        try:
            settings.folder.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=settings.folder).close()
        except OSError as exc:
            raise ConfigError(
                f"--profiler-config: the folder {settings.folder} can't be used ({exc.strerror}); choose another "
                "torch_profiler_dir."
            ) from exc
        self._tracer = tracer
        self._spans: Spans | None = None
        self._name = ""
        self._steps = 0
        self._began = 0.0
        self._launched: dict[str, Any] = {}

    @property
    def running(self) -> bool:
        """Whether a profile was started and not stopped."""
        return self._spans is not None

    def start(self, prefix: str) -> Spans:
        """Start a profile; return its spans, for the caller to watch methods with.

        Args:
            prefix: start of the trace's file name.

        Raises:
            EngineStateError: a profile is running.
            InvalidRequestError: the prefix can't be part of a file name.
        """
        if self.running:
            raise EngineStateError("A profile is running already; stop it first (/stop_profile).")
        if not _PREFIX.fullmatch(prefix):
            raise InvalidRequestError(
                "profile_prefix may have letters, digits, '.', '-' and '_'.", param="profile_prefix", value=prefix
            )
        self._settings.folder.mkdir(parents=True, exist_ok=True)
        self._name = f"{prefix or 'octavo'}-{os.getpid()}.{time.time_ns() // 1_000_000}.pt.trace.json"
        self._began, self._steps = time.monotonic(), 0
        self._tracer.start()
        self._spans = Spans()
        return self._spans

    def stop(self) -> str:
        """Stop the profile and write it; return the path of the trace, or "" if no profile was running.

        Raises:
            EngineStateError: it can't be written.
        """
        spans, self._spans = self._spans, None
        if spans is None:
            return ""
        spans.release()
        path = self._settings.folder / (self._name + (".gz" if self._settings.use_gzip else ""))
        try:
            self._write(spans, path)
        except OSError as exc:
            # Where torch can't write, such as on a full disk, it only leaves its file out.
            raise EngineStateError(
                f"The profile can't be written to {path.parent} ({exc.strerror}); make room, or the folder."
            ) from exc
        log.info("a profile of %d steps was written to %s", self._steps, path)
        return str(path)

    def _write(self, spans: Spans, path: Path) -> None:
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=".profile-") as folder:
            seen, whole = Path(folder) / "seen.json", Path(folder) / path.name
            self._tracer.stop(seen)
            with seen.open(encoding="utf-8") as source, _open(whole) as out:
                merge(source, spans, out)
            whole.replace(path)

    def counted(self, step: StepFunction) -> StepFunction:
        """Wrap a loop's step in a span; end the profile after a step that exceeds its limits."""

        def noted() -> list[TokenDelta]:
            spans, self._launched = self._spans, {}
            began = time.monotonic_ns()
            news = step()
            self._steps += 1
            if spans is not None:
                about = {"step": self._steps, **self._launched}
                spans.add(Span("step", "steps", began, time.monotonic_ns(), about))
            self.end_if_due()
            return news

        return noted

    def about(self, plan: StepPlan) -> dict[str, Any]:
        """Return the arguments of a step's spans."""
        self._launched = {"requests": len(plan.slots), "tokens": plan.total_tokens, "new_requests": len(plan.new)}
        return self._launched

    def end_if_due(self) -> None:
        """End the profile if it has reached its limit of steps or seconds."""
        settings = self._settings
        over = self._steps >= settings.max_steps or time.monotonic() - self._began >= settings.max_seconds
        if self.running and over:
            log.warning(
                "the profile ends after %d steps; its limits are %d steps (max_iterations) and %d s (max_seconds)",
                self._steps,
                settings.max_steps,
                settings.max_seconds,
            )
            self.end()

    def end(self) -> None:
        """Call `stop`, and only log its errors."""
        try:
            self.stop()
        except Exception:
            log.exception("failed to write the profile")


def _open(path: Path) -> IO[str]:
    if path.suffix == ".gz":
        return gzip.open(path, "wt", compresslevel=3, encoding="utf-8")
    return path.open("w", encoding="utf-8")


def merge(source: IO[str], spans: Iterable[Span], out: IO[str]) -> None:
    """Copy a trace and insert the spans before its events. Times are microseconds since a base given in its header."""
    head = source.read(_HEAD)
    base, events = _BASE.search(head), _EVENTS.search(head)
    if events is None:
        raise ValueError("the profiler's trace has no list of events in its header")
    out.write(head[: events.end()])
    # Wall-clock times, as torch's.
    zero = time.time_ns() - time.monotonic_ns() - (int(base[1]) if base else 0)
    for event in _events(spans, zero):
        out.write(json.dumps(event) + ",\n")
    out.write(head[events.end() :])
    shutil.copyfileobj(source, out)


def _events(spans: Iterable[Span], zero: int) -> Iterator[dict[str, Any]]:
    process = os.getpid()
    rows = {row: index + 1 for index, row in enumerate(_ROWS)}
    for row, index in rows.items():
        yield _meta("thread_name", process, index, name=f"octavo: {row}")
        yield _meta("thread_sort_index", process, index, sort_index=index - len(rows) - 1)
    for span in spans:
        yield {
            "ph": "X",
            "cat": "octavo",
            "name": span.name,
            "pid": process,
            "tid": rows[span.row],
            "ts": (span.began + zero) / 1000,
            "dur": (span.ended - span.began) / 1000,
            "args": span.about,
        }


def _meta(what: str, process: int, row: int, **about: Any) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": process, "tid": row, "args": about}
