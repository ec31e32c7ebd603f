"""Compile Triton kernels in parallel, before they are needed."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
from triton.runtime import driver
from triton.runtime.jit import JITFunction, MockTensor

from octavo.device.compiler import CompileTarget
from octavo.device.compilers import Compilers, job_of
from octavo.device.launchers import separate_launchers

log = logging.getLogger(__name__)


class Ahead:
    """Records launches instead of performing them, and compiles their kernels in the background.

    Launches that differ only in addresses and sizes are compiled once, by Triton's own rules for variants: whether a
    number is 1 or divisible by 16, and an address divisible by 16.
    """

    def __init__(self, target: CompileTarget, turn: tuple[int, int] = (0, 1)) -> None:
        """
        Args:
            target: the device to compile for.
            turn: the process's number among those of this machine that compile the same launches, and their number.
                Each begins with its own share, and finds most others in Triton's cache folder afterwards.
        """
        separate_launchers()
        self._target = target
        self._turn = turn
        self._compilers = Compilers()
        threads = min(16, max(1, (os.cpu_count() or 1) // turn[1]))
        self._pool = ThreadPoolExecutor(threads + 1, thread_name_prefix="octavo-compile")
        self._driver = self._pool.submit(_load_driver)
        self._found: set[Any] = set()
        self._jobs: dict[Any, Future[None]] = {}

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Compile the launches of this block without launching. Nothing else may launch Triton kernels meanwhile."""
        run = JITFunction.run
        number, count = self._turn
        others: list[tuple[Any, Any, list[Any], dict[str, Any]]] = []

        def compile_only(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
            named = zip(kernel.params, args, strict=False)
            key = (kernel, *(_variant(param, arg) for param, arg in named), *options.items())
            if key in self._found:
                return
            own = len(self._found) % count == number
            self._found.add(key)
            job = key, kernel, [_stand_in(arg) for arg in args], options
            if own:
                self._begin(run, *job)
            else:
                others.append(job)

        JITFunction.run = compile_only
        try:
            yield
        finally:
            JITFunction.run = run
        for job in others:
            self._begin(run, *job)

    def _begin(self, run: Callable[..., Any], key: Any, kernel: Any, args: list[Any], options: dict[str, Any]) -> None:
        self._jobs[key] = self._pool.submit(self._compile, run, kernel, args, options)

    def wait(self) -> int:
        """Wait for the compilation and return the number of kernels. Failures are only logged: a launch that needs such
        a kernel fails itself."""
        for key, job in self._jobs.items():
            error = job.exception()
            if error is not None:
                log.warning("a variant of %s was not compiled ahead: %s", getattr(key[0], "__name__", key[0]), error)
        self._pool.shutdown()
        self._compilers.close()
        return len(self._jobs)

    def _compile(self, run: Callable[..., Any], kernel: Any, args: list[Any], options: dict[str, Any]) -> None:
        with self._compilers.compiling(job_of(kernel, args, options, self._target)):
            self._driver.exception()  # an error shows up in the next line
            compiled = run(kernel, *args, grid=(1,), warmup=True, **options)
        prepare = getattr(compiled, "_init_handles", None)
        if prepare is not None:
            prepare()  # builds the launcher and loads the kernel


def target_of(device: torch.device) -> CompileTarget:
    """Return Triton's name of a device."""
    major, minor = torch.cuda.get_device_capability(device)
    return ("cuda", 10 * major + minor, 32)


def _load_driver() -> None:
    """Load Triton's driver, which compiles a part of itself the first time: once, instead of in each thread."""
    driver.active.get_current_device()


def _variant(param: Any, value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.dtype, value.data_ptr() % 16 == 0
    if type(value) is int and not param.is_constexpr:
        wide = value.bit_length() > 31
        return (wide,) if param.do_not_specialize else (wide, value == 1, value % 16 == 0)
    return value if isinstance(value, bool | int | float | str) else id(value)


def _stand_in(value: Any) -> Any:
    """Return an argument of the same variant that holds no memory."""
    if isinstance(value, torch.Tensor) and value.data_ptr() % 16 == 0:
        return MockTensor(value.dtype)
    return value
