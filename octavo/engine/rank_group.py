"""`RankGroup`: the ranks of one model. Each message goes to all of them; all answer calls, one answers steps."""

from __future__ import annotations

import contextlib
import itertools
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar

import msgspec

from octavo.core.errors import DeviceLostError
from octavo.core.output import StepOutput
from octavo.engine import rank_wire as wire
from octavo.engine.failure import Failure
from octavo.engine.frames import frame
from octavo.engine.rank_moves import RankMoves
from octavo.engine.ring import RingHandles, RingWriter

_LOOK_S = 0.25
_STOPPED_S = 1.0
_AGREE_S = 10.0

T = TypeVar("T")


class RankError(RuntimeError):
    """A step or call failed in a rank; the rank's log has the traceback."""


class AnyRank(Protocol):
    """A rank's process: `RankProcess` on this machine, `RemoteRank` on another one."""

    number: int
    device: str

    @property
    def pid(self) -> int: ...

    @property
    def stopped(self) -> bool: ...

    def listen(self, take: Callable[[int, wire.FromRank], None], ended: Callable[[int, str], object]) -> None: ...

    def lost(self, reason: str) -> DeviceLostError: ...

    def hang_up(self) -> None: ...

    def wait(self) -> None: ...

    def kill(self) -> None: ...


class _Call:
    """A call, and each rank's answer so far: the encoded result, or the error.

    Attributes:
        failed: the first error that came, and when. The other ranks may wait for the one that failed.
    """

    def __init__(self, size: int, *, together: bool, at_once: bool) -> None:
        self.together, self.at_once = together, at_once
        self.answers: list[msgspec.Raw | Exception | None] = [None] * size
        self.failed: tuple[Exception, float] | None = None
        self.future: Future[list[msgspec.Raw]] = Future()


class RankGroup:
    """Starts the processes of the ranks, and loses all of them if one is lost: the others would wait for it forever.

    Attributes:
        processes: in the order of the ranks.
    """

    def __init__(
        self,
        size: int,
        start: Callable[[int, RingHandles], AnyRank],
        timeout_s: float | None = None,
        keep: contextlib.AbstractContextManager[object] | None = None,
        answering: int = 0,
    ) -> None:
        """
        Args:
            start: starts a rank's process, given its number.
            timeout_s: most seconds of a step; None for no limit.
            keep: what the ranks need while they run; it is exited when they have ended.
            answering: the rank that sends the steps' outputs.
        """
        self._timeout_s = timeout_s
        self._kept = contextlib.ExitStack()
        if keep is not None:
            self._kept.push(keep)
        self._answering_rank = answering
        self._sending = threading.Lock()
        self._answering = threading.RLock()
        self._numbers = itertools.count()
        self._calls: dict[int, _Call] = {}
        self._outputs: queue.SimpleQueue[wire.RankOutput | wire.StepFailed | None] = queue.SimpleQueue()
        self._failures: dict[int, tuple[int, str, float]] = {}
        """Step that failed in another rank than the answering one -> the rank, the reason, the time of the report."""
        self._moves = RankMoves(size)
        self._lost: DeviceLostError | None = None
        self._closed = threading.Event()
        self._ring = RingWriter(size)
        self.processes: list[AnyRank] = []
        try:
            for number in range(size):
                self.processes.append(start(number, self._ring.handles(number)))
            for process in self.processes:
                process.listen(self._take, self._lose)
        except BaseException:
            self.kill()
            raise
        self._watcher = threading.Thread(target=self._watch, name="octavo-ranks", daemon=True)
        self._watcher.start()

    @property
    def size(self) -> int:
        return len(self.processes)

    def check(self) -> None:
        """Raise DeviceLostError if a process has ended or a device is lost."""
        if self._lost is not None:
            raise self._lost

    def send(self, message: wire.ToRank) -> None:
        """Send a message to all ranks. Raise DeviceLostError if one has ended."""
        data = frame(wire.encode(message))
        with self._sending:
            self.check()
            self._ring.write(data, self.check)

    def fetch(self, step: int) -> StepOutput:
        """Wait for a step's output of the answering rank, with what all ranks have reported of transfers.

        Raises:
            RankError: the step failed, in all ranks.
            DeviceLostError: a process has ended, its device is lost, or the ranks do not agree any more.
        """
        self.send(wire.FetchOutput(step))
        while True:
            try:
                found = self._outputs.get(timeout=self._timeout_s)
            except queue.Empty:
                raise self._lose(
                    self._answering_rank, f"step {step} was not finished within {self._timeout_s:g} s (--rank-timeout)"
                ) from None
            if found is None:
                self._outputs.put(None)
                self.check()
                raise AssertionError("a rank ended without a reason")
            if found.step != step:  # an earlier step, whose result was given up
                continue
            if isinstance(found, wire.RankOutput):
                self._check_agreed(step)
                moved = self._moves.take()
                if not moved and not found.output.moved:
                    return found.output
                return msgspec.structs.replace(found.output, moved=moved)
            raise self._failed(found)

    def call(self, kind: type[T], method: str, *args: Any, together: bool = False, at_once: bool = False) -> list[T]:
        """Call a method of `rank.py` in each rank and return the ranks' results.

        Args:
            kind: type of a result.
            args: values of built-in types.
            together: the ranks differ if only some succeed, so that all are lost then.
            at_once: raise the first error that comes. The others, which may wait for the rank that failed, must be
                killed then.

        Raises:
            OctavoError: the method raised this error of `core.errors`.
            RankError: it failed otherwise.
            DeviceLostError: a process has ended or its device is lost.
        """
        answers = self.post(method, *args, together=together, at_once=at_once).result()
        return [msgspec.msgpack.decode(answer, type=kind) for answer in answers]

    def post(self, method: str, *args: Any, together: bool = False, at_once: bool = False) -> Future[list[msgspec.Raw]]:
        """`call` without waiting; the future's results are encoded."""
        number = next(self._numbers)
        call = self._calls[number] = _Call(self.size, together=together, at_once=at_once)
        self.send(wire.CallMethod(number, method, list(args)))
        self.check()  # a process may have ended since, and would never answer
        return call.future

    def close(self) -> None:
        """Close the sockets, which ends the processes; kill those that do not end in time."""
        self._closed.set()
        for process in self.processes:
            process.hang_up()
        for process in self.processes:
            process.wait()
        self.kill()

    def kill(self) -> None:
        """Kill the processes that have not ended, wait for their end, and free the ring and what they needed."""
        self._closed.set()
        for process in self.processes:
            process.kill()
        with self._sending:
            self._ring.close()
            if self._lost is None:
                self._lost = DeviceLostError("the ranks", "they were ended")
        self._kept.close()

    def _take(self, rank: int, message: wire.FromRank) -> None:
        if isinstance(message, wire.RankReply):
            with self._answering:
                self._answered(rank, message)
        elif isinstance(message, wire.RankMoved):
            self._moves.add(rank, message.moved)
        elif rank == self._answering_rank:
            if isinstance(message, wire.RankOutput) and message.output.moved:
                self._moves.add(rank, message.output.moved)
            self._outputs.put(message)
        elif isinstance(message, wire.StepFailed):
            self._failures[message.step] = rank, message.failure.message, time.monotonic()
            if message.lost is not None:
                self._lose(rank, message.lost)

    def _answered(self, rank: int, message: wire.RankReply) -> None:
        call = self._calls.get(message.number)
        if call is None:  # it has failed at once
            return
        if message.failure is None:
            call.answers[rank] = message.value
        else:
            error = call.answers[rank] = self._error(rank, message.failure, message.lost)
            call.failed = call.failed or (error, time.monotonic())
        over = None not in call.answers or (call.at_once and call.failed is not None)
        if call.future.done() or not over:
            return
        del self._calls[message.number]
        results = [one for one in call.answers if isinstance(one, msgspec.Raw)]
        if call.failed is None:
            call.future.set_result(results)
        elif call.together and results and not call.at_once:
            call.future.set_exception(self._lose(rank, f"only some of the ranks failed: {call.failed[0]}"))
        else:
            call.future.set_exception(call.failed[0])

    def _error(self, rank: int, failure: Failure, lost: str | None) -> Exception:
        if lost is not None:
            return self._lose(rank, lost)
        return failure.known() or RankError(f"rank {rank}: {failure.message}")

    def _check_agreed(self, step: int) -> None:
        """Raise DeviceLostError if another rank failed a step that the answering one computed."""
        for failed in [one for one in list(self._failures) if one <= step]:  # threads that listen add to it
            raise self._failed_alone(failed)

    def _failed_alone(self, step: int) -> DeviceLostError:
        rank, reason, _ = self._failures[step]
        return self._lose(rank, f"step {step} failed in this rank only: {reason}")

    def _failed(self, found: wire.StepFailed) -> Exception:
        """Return the error of a step that failed in the answering rank, once all ranks say that they failed it, too."""
        number = self._answering_rank
        if found.lost is not None:
            return self._lose(number, found.lost)
        if self.size > 1:
            try:
                answers = self.post("failed", found.step).result(_AGREE_S)
            except TimeoutError:
                return self._lose(number, f"step {found.step} failed in this rank only: {found.failure.message}")
            except DeviceLostError as lost:
                return lost
            for rank, answer in enumerate(answers):
                if not msgspec.msgpack.decode(answer, type=bool):
                    why = f"step {found.step} failed here, not in rank {rank}: {found.failure.message}"
                    return self._lose(number, why)
            self._failures.clear()
        return self._error(number, found.failure, None)

    def _lose(self, rank: int, reason: str) -> DeviceLostError:
        """Record that a rank is lost, end all waiting calls, and return the error. The first reason is kept."""
        with self._answering:
            if self._lost is None:
                self._lost = self.processes[rank].lost(reason)
            self._outputs.put(None)
            for call in list(self._calls.values()):
                if not call.future.done():
                    call.future.set_exception(self._lost)
            return self._lost

    def _watch(self) -> None:
        """Lose the ranks if one was stopped, which neither ends nor answers, or failed a step or call that others do
        not finish, since they wait for its part."""
        since: dict[int, float] = {}
        while not self._closed.wait(_LOOK_S) and self._lost is None:
            now = time.monotonic()
            for process in self.processes:
                if not process.stopped:
                    since.pop(process.number, None)
                elif now - since.setdefault(process.number, now) >= _STOPPED_S:
                    self._lose(process.number, "its process was stopped by a signal (SIGSTOP) and does not go on")
            for step, (_, _, at) in list(self._failures.items()):
                if now - at > _AGREE_S:
                    self._failed_alone(step)
            self._look_at_calls(now)

    def _look_at_calls(self, now: float) -> None:
        """Lose the ranks if one has not answered a call of all together that another failed long ago: it may wait for
        that one's part, and they differ in any case."""
        if self._timeout_s is None:
            return
        with self._answering:
            for call in list(self._calls.values()):
                error, at = call.failed or (None, now)
                if call.together and now - at > self._timeout_s and not call.future.done():
                    why = f"it did not end within {self._timeout_s:g} s (--rank-timeout) what another rank failed"
                    self._lose(call.answers.index(None), f"{why}: {error}")


def ranks_of(names: Sequence[str]) -> str:
    """Return the devices of ranks for display: "2 x NAME" if all have one name."""
    return names[0] if len(names) == 1 else f"{len(names)} x {names[0]}" if len(set(names)) == 1 else ", ".join(names)
