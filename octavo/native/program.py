"""`Program`: a forward pass as a list of operations that the C++ library runs in one call."""

from __future__ import annotations

import ctypes
import time
from array import array
from typing import Any

from octavo.core.spans import Label, Spans
from octavo.native.bindings import Decode, Dtype, Op, OpKind, StepArgs, code_of, kernel_of, open_library
from octavo.native.build import level_of
from octavo.native.builder import ProgramBuilder

_LOST = 2
"""The library's answer if another rank was not there in time; negative of a decoding step."""


class Pool:
    """A team of compute threads, asleep while no program runs.

    Attributes:
        isa: the requested instruction set.
        level: the instruction set in use.
    """

    def __init__(self, threads: int, isa: str = "auto") -> None:
        self.kernels = open_library(isa)
        self.isa = isa
        self.level = level_of(isa)
        self.threads = threads
        self.handle = self.kernels.octavo_pool_create(threads)

    def __del__(self) -> None:
        if handle := getattr(self, "handle", None):
            self.kernels.octavo_pool_destroy(handle)


class Program:
    """The operations of a builder, bound to a pool. Not thread-safe.

    Raises:
        NativeBuildError: a kernel in a separate library can't be compiled or loaded.
    """

    def __init__(self, pool: Pool, b: ProgramBuilder) -> None:
        self._pool = pool
        self._kept = (b.kept, b.nested)
        self._exchange = b.exchange
        for op in b.ops:
            op.kernel, op.code = kernel_of(op, pool.isa), code_of(op, pool.isa)
        for ops in b.nested:
            for op in ops:
                op.kernel = kernel_of(op, pool.isa)
        self._ops, count = (Op * len(b.ops))(*b.ops), len(b.widths)
        sizes, rows = (ctypes.c_int64 * count)(*b.widths), (ctypes.c_int32 * count)(*b.rows)
        create = pool.kernels.octavo_program_create
        self._handle = create(pool.handle, self._ops, len(b.ops), sizes, rows, count)
        self._run = pool.kernels.octavo_program_run
        self._decode = pool.kernels.octavo_decode

    def run(self, first: int, last: int, step: StepArgs) -> None:
        """Run operations [first, last).

        Raises:
            MemoryError: the buffers for the step's tokens can't be allocated.
            DeviceLostError: another rank was not there in time for a sum.
        """
        failed = self._run(self._handle, first, last, ctypes.byref(step))
        if failed == _LOST and self._exchange is not None:
            raise self._exchange.lost()
        if failed:
            raise MemoryError(f"not enough memory for the activations of a step of {step.tokens} tokens")

    def decode(self, step: Decode) -> int:
        """Run a whole step of one token per row, and its drafts: layout, all operations, sampling, verification.

        Appends the tokens that are kept to the slots and counts the computed positions. Without `columns` of logits,
        nothing is sampled or appended.

        Returns:
            The number of rows of logits without a finite largest one; their token is 0.

        Raises:
            MemoryError, DeviceLostError: as `run`, with the slots unchanged.
        """
        flawed: int = self._decode(self._handle, ctypes.byref(step))
        if flawed == -_LOST and self._exchange is not None:
            raise self._exchange.lost()
        if flawed < 0:
            raise MemoryError(f"not enough memory for the activations of a step of {step.results} tokens")
        return flawed

    def watch(self, spans: Spans) -> None:
        """Record each operation in a profile's spans until they are released. Times are those of the first thread."""
        labels, count = [_label(op) for op in self._ops], len(self._ops)
        # The end of each operation; the last element is the start of the first. Times of the library's own clock.
        ends = array("q", bytes(8 * (count + 1)))
        run, decode, time_to = self._run, self._decode, self._pool.kernels.octavo_program_time

        def note(began: int, first: int, last: int) -> None:
            offset = began - ends[count]
            spans.add_series(
                labels[first:last], "kernels", began, array("q", (end + offset for end in ends[first:last]))
            )

        def watched_run(handle: int, first: int, last: int, step: Any) -> int:
            began = time.monotonic_ns()
            failed: int = run(handle, first, last, step)
            note(began, first, last)
            return failed

        def watched_decode(handle: int, step: Any) -> int:
            began = time.monotonic_ns()
            flawed: int = decode(handle, step)
            note(began, 0, count)
            return flawed

        time_to(self._handle, ends.buffer_info()[0])
        spans.replace(self, "_run", watched_run)
        spans.replace(self, "_decode", watched_decode)
        spans.at_release(lambda: time_to(self._handle, None))

    def __del__(self) -> None:
        if handle := getattr(self, "_handle", None):
            self._pool.kernels.octavo_program_destroy(handle)


def _label(op: Op) -> Label:
    """Return an operation's name and arguments for a profile."""
    about = {"rows": op.rows} if op.rows else {}
    about |= {"columns": op.columns} if op.columns else {"heads": op.heads, "head_dim": op.head_dim}
    return Label(OpKind(op.kind).name.lower(), about | {"dtype": Dtype(op.dtype).name.lower()})
