"""A process that compiles Triton kernels for a GPU without using it; started by `compilers.py`.

It loads neither torch nor the GPU's driver, so it starts within some tenths of a second.
"""

from __future__ import annotations

import importlib
import pickle
import signal
import sys
from dataclasses import dataclass
from typing import Any

from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import MockTensor
from triton.tools.tensor_descriptor import TensorDescriptor


@dataclass(frozen=True, slots=True)
class TorchDtype:
    """Stand-in for torch.dtype: its name, such as "torch.float32", and its size in bytes."""

    name: str
    itemsize: int

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True, slots=True)
class Pointer:
    """A tensor argument with an address divisible by 16."""

    dtype: TorchDtype


@dataclass(frozen=True, slots=True)
class Tiles:
    """A tensor descriptor argument, with the fields of Triton's own."""

    base: Pointer
    shape: list[int]
    strides: list[int]
    block_shape: list[int]


CompileTarget = tuple[str, int | str, int]
"""Backend, architecture and warp size."""


@dataclass(frozen=True, slots=True)
class CompileJob:
    """A launch to compile the kernel of.

    Attributes:
        module, name: the kernel's module and name.
        args: numbers and strings unchanged, tensors as `Pointer`, descriptors as `Tiles`.
    """

    module: str
    name: str
    args: list[Any]
    options: dict[str, Any]
    target: CompileTarget


class NoDriver:
    """The part of a driver that compilation needs."""

    def __init__(self, target: GPUTarget) -> None:
        self._target = target

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def serve() -> None:
    """Compile pickled jobs from standard input into Triton's cache folder; answer each on standard output with None or
    an error text. Return at the end of the input."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent stops this process
    sys.modules.setdefault("torch", None)  # type: ignore[arg-type]  # Triton imports it only to recognize tensors
    answers, sys.stdout = sys.stdout.buffer, sys.stderr
    while True:
        try:
            job = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        try:
            compile_job(job)
            answer = None
        except Exception as exc:  # Triton's compiler may raise anything; the parent gets the text
            answer = f"{type(exc).__name__}: {exc}"
        pickle.dump(answer, answers)
        answers.flush()


def compile_job(job: CompileJob) -> None:
    driver.set_active(NoDriver(GPUTarget(*job.target)))
    kernel = getattr(importlib.import_module(job.module), job.name)
    kernel.run(*map(_stand_in, job.args), grid=(1,), warmup=True, **job.options)


def _stand_in(value: Any) -> Any:
    if isinstance(value, Pointer):
        return MockTensor(value.dtype)
    if isinstance(value, Tiles):
        return TensorDescriptor(MockTensor(value.base.dtype), value.shape, value.strides, value.block_shape)
    return value
