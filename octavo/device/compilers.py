"""Processes that compile Triton kernels, since the GIL serializes compilation in threads."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from triton import knobs
from triton.runtime.cache import FileCacheManager
from triton.tools.tensor_descriptor import TensorDescriptor

from octavo.device.compiler import CompileJob, CompileTarget, Pointer, Tiles, TorchDtype

_SERVE = "from octavo.device.compiler import serve; serve()"
_PLAIN = (bool, int, float, str, type(None))


class Compilers:
    """One process for each thread, started at its first job.

    While this is open, a kernel missing from Triton's cache folder is first compiled by the thread's process, if the
    thread has named the job (`compiling`). Cached kernels start no process. With an empty cache folder the process
    compiles at once.
    """

    def __init__(self) -> None:
        folder = knobs.cache.dir
        self._empty = not (os.path.isdir(folder) and os.listdir(folder))
        self._mine = threading.local()
        self._all: list[subprocess.Popen[bytes]] = []
        self._before = knobs.cache.manager_class
        knobs.cache.manager_class = _asking(self._before or FileCacheManager, self._ask)

    @contextmanager
    def compiling(self, job: CompileJob | None) -> Iterator[None]:
        """Name the job that this thread compiles in the block; None if it can't be sent to another process."""
        self._mine.job = job
        if self._empty:
            self._ask()
        try:
            yield
        finally:
            self._mine.job = None

    def close(self) -> None:
        knobs.cache.manager_class = self._before
        for process in self._all:
            process.kill()  # it holds nothing, and an orderly exit takes half a second
        for process in self._all:
            process.communicate()

    def _ask(self) -> bool:
        """Compile in the process; return whether that succeeded. Otherwise the thread itself compiles."""
        job, self._mine.job = getattr(self._mine, "job", None), None
        if job is None:
            return False
        try:
            process = self._process()
            assert process.stdin is not None
            assert process.stdout is not None
            pickle.dump(job, process.stdin)
            process.stdin.flush()
            return pickle.load(process.stdout) is None
        except (OSError, EOFError, pickle.PickleError):
            return False

    def _process(self) -> subprocess.Popen[bytes]:
        mine: subprocess.Popen[bytes] | None = getattr(self._mine, "process", None)
        if mine is None:
            pipe = subprocess.PIPE
            mine = subprocess.Popen([sys.executable, "-c", _SERVE], stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL)
            self._mine.process = mine
            self._all.append(mine)
        return mine


def job_of(kernel: Any, args: Sequence[Any], options: dict[str, Any], target: CompileTarget) -> CompileJob | None:
    """Return a launch as a job for another process, or None if an argument can't be sent."""
    told = [_told(arg) for arg in args]
    module, name = kernel.fn.__module__, kernel.fn.__name__
    if NotImplemented in told or getattr(sys.modules.get(module), name, None) is not kernel:
        return None
    return CompileJob(module, name, told, options, target)


def _told(value: Any) -> Any:
    if isinstance(value, TensorDescriptor):
        return Tiles(_told(value.base), [*value.shape], [*value.strides], [*value.block_shape])
    if hasattr(value, "data_ptr"):
        dtype = TorchDtype(str(value.dtype), value.dtype.itemsize)
        return Pointer(dtype) if value.data_ptr() % 16 == 0 else NotImplemented
    return value if isinstance(value, _PLAIN) else NotImplemented


def _asking(manager: Any, ask: Any) -> Any:
    class Asking(manager):  # type: ignore[misc]  # the base is an argument, since users may set another
        def get_group(self, filename: str) -> dict[str, str] | None:
            found: dict[str, str] | None = super().get_group(filename)
            return super().get_group(filename) if not found and ask() else found

    return Asking
