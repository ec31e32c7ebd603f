"""Engine half: writes a line for each request that has ended."""

from __future__ import annotations

import fcntl
import logging
import os
import time
import weakref
from dataclasses import dataclass
from pathlib import Path

import msgspec

from octavo.core.errors import ConfigError
from octavo.core.trace import TraceLine
from octavo.features import FeatureContext
from octavo.features.traffic.hashes import BlockHashes
from octavo.features.traffic.settings import TrafficSettings
from octavo.schedule.hooks import EngineHook
from octavo.schedule.request import Request

log = logging.getLogger(__name__)

BLOCK_TOKENS = 16
"""Tokens of a hashed block: the usual size of a KV block, so prefixes are shared as in the engine."""


@dataclass(slots=True)
class _Choices:
    """The ended choices of a request whose others still run: the first one, and the longest."""

    first: Request
    longest: Request
    ended: int = 0


class TrafficRecorder(EngineHook):
    """Writes lines up to a limit. If the file can't be continued, recording stops and the engine continues.

    Nothing is written of a request before its end, and nothing of requests that generate no text.
    """

    name = "traffic"
    admits_for_good = True

    def __init__(self, file: LimitedFile) -> None:
        self._file = file
        self._hashes = BlockHashes(BLOCK_TOKENS)
        self._began = time.monotonic()
        self._running: dict[str, _Choices] = {}

    def on_release(self, request: Request) -> None:
        spec = request.spec
        if spec.prompt_only or not spec.arrival or self.name in request.extra or not self._file.open:
            return  # without an arrival, no front end sent it
        request.extra[self.name] = True  # after a failure, this is called again
        if request.index >= spec.params.n:
            return  # a further beam
        choices = self._running.setdefault(request.id, _Choices(request, request))
        choices.ended += 1
        choices.first = min(choices.first, request, key=lambda one: one.index)
        choices.longest = max(choices.longest, request, key=lambda one: one.num_output)
        if choices.ended == spec.params.n:
            del self._running[request.id]
            self._file.write(msgspec.json.encode(self._line(choices.first, choices.longest)) + b"\n")

    def _line(self, first: Request, longest: Request) -> TraceLine:
        spec, now = first.spec, time.monotonic()
        hash_ids, answer_ids = self._hashes.of(first.namespace or spec.namespace, first.keys, first.num_prompt)
        return TraceLine(
            timestamp=round(max(0.0, spec.arrival - self._began) * 1000, 3),
            input_length=first.num_prompt,
            output_length=longest.num_output,
            hash_ids=hash_ids,
            block_size=BLOCK_TOKENS,
            max_tokens=spec.params.max_tokens,
            n=spec.params.n,
            priority=spec.priority,
            finish=str(longest.finish or ""),
            answer_ids=answer_ids,
            cached=first.num_cached,
            ttft=round((first.first_token - spec.arrival) * 1000, 3) if first.first_token else None,
            latency=round((now - spec.arrival) * 1000, 3),
        )


class LimitedFile:
    """A file that no other process writes, up to a limit of bytes.

    Attributes:
        open: whether more may be written.

    Raises:
        ConfigError: the file can't be written, or another process writes it.
    """

    def __init__(self, path: Path, limit: int) -> None:
        self._path = path
        self._left = limit
        self.open = True
        try:
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
            self._close = weakref.finalize(self, os.close, self._file)
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if path.is_file():  # not a device
                os.ftruncate(self._file, 0)
        except BlockingIOError as exc:
            self._close()
            raise ConfigError(
                f"--record-traffic {path} is being written by another engine. Replicas of a model need a file each: "
                "put %p, the process id, into the name."
            ) from exc
        except OSError as exc:
            raise ConfigError(
                f"--record-traffic {path} can't be written ({exc.strerror}); choose another file."
            ) from exc

    def write(self, line: bytes) -> None:
        """Write a line at once, or stop."""
        self._left -= len(line)
        if self._left < 0:
            self._stop("the file has reached its limit (--record-traffic-limit)")
            return
        try:
            written = os.write(self._file, line)
        except OSError as exc:
            self._stop(f"the file can't be written ({exc.strerror})")
            return
        if written < len(line):
            self._stop("the disk is full")

    def _stop(self, why: str) -> None:
        log.warning("recording requests in %s stops here: %s", self._path, why)
        self.open = False
        self._close()


def build_engine(context: FeatureContext) -> TrafficRecorder | None:
    settings = context.settings_of(TrafficSettings)
    if settings.record_traffic is None:
        return None
    path = Path(settings.record_traffic.replace("%p", str(os.getpid()))).expanduser()
    return TrafficRecorder(LimitedFile(path, settings.record_traffic_limit))
