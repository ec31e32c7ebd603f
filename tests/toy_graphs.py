"""Which graphs are replayed: a GPU's own, or on machines without one the calls of a step on fixed buffers, as CUDA
has them."""

from __future__ import annotations

import gc
import threading
from collections import Counter
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from rank_kit import ThreadCollectives
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from toy_models import Behind
from triton.runtime.interpreter import InterpretedFunction

from octavo.device.cuda_transfer import CudaLink, CudaRecorder
from octavo.device.transfer import Graph, HostLink, Link
from octavo.worker.resident.warm_up import warm_up

_KINDS = {"_forward": "forward", "compute": "sample", "_forward_mixed": "mixed", "_draft_recorded": "tree"}
_RECORDING = threading.local()
"""`tape` is what this thread records; missing or None if it records nothing. Ranks may be threads."""


class Tape(TorchDispatchMode):
    """A graph: torch's operations and Triton's launches in their order, with the very tensors that they had.

    None of the Python between them runs again, so what it decided and computed is fixed, as in a CUDA graph.
    """

    def __init__(self, name: str, replayed: Counter[str]) -> None:
        super().__init__()
        self._name = name
        self._replayed = replayed
        self._calls: list[Callable[[], None]] = []
        self._paused = False

    def record(self, launch: Callable[[], None]) -> None:
        _RECORDING.tape = self
        try:
            with self:
                launch()
        finally:
            _RECORDING.tape = None

    def replay(self) -> None:
        self._replayed[self._name] += 1
        for call in self._calls:
            call()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        made = func(*args, **kwargs)
        if not self._paused:
            self._note(func, args, kwargs, made)
        return made

    def _note(self, func: Any, args: Any, kwargs: Any, made: Any) -> None:
        outputs = [one for one in tree_leaves(made) if isinstance(one, Tensor)]
        if func._schema.is_mutable:
            self._calls.append(lambda: func(*args, **kwargs))
            return
        given = {_memory(one) for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)}
        if "empty" in func._schema.name or all(_memory(one) in given for one in outputs):
            return  # nothing is computed: memory is allocated, or seen in another way
        self._calls.append(lambda: _copy(func(*args, **kwargs), outputs))

    def call(self, run: Callable[[], Tensor | None]) -> Tensor | None:
        """Record a call as a whole, with all that it does in torch. Return a copy of the tensor that it makes."""
        _RECORDING.tape, self._paused = None, True
        found = run()
        made = None if found is None else found.clone()
        _RECORDING.tape, self._paused = self, False
        self._calls.append(lambda: _copy(run(), [] if made is None else [made]))
        return made


def _record_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let tapes record what they can't as torch's operations: launches of Triton's kernels, whose interpreter calls
    torch itself, and what ranks in threads gather. Transfers from the host are refused meanwhile."""
    for kind, name in ((InterpretedFunction, "run"), (ThreadCollectives, "all_gather")):
        monkeypatch.setattr(kind, name, _recorded(getattr(kind, name)))
    upload = HostLink.upload

    def refusing(link: HostLink, array: np.ndarray) -> Tensor:
        assert getattr(_RECORDING, "tape", None) is None, "a transfer from the host was recorded"
        return upload(link, array)

    monkeypatch.setattr(HostLink, "upload", refusing)


def _recorded(call: Callable[..., Any]) -> Callable[..., Any]:
    def recorded(*args: Any, **options: Any) -> Any:
        tape: Tape | None = getattr(_RECORDING, "tape", None)
        return call(*args, **options) if tape is None else tape.call(partial(call, *args, **options))

    return recorded


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _copy(values: Any, into: list[Tensor]) -> None:
    made = [one for one in tree_leaves(values) if isinstance(one, Tensor)]
    for value, place in zip(made, into, strict=True):
        place.copy_(value)


class CountedGraph:
    """A graph of a device that counts its replays."""

    def __init__(self, graph: Graph, name: str, replayed: Counter[str]) -> None:
        self._graph = graph
        self._name = name
        self._replayed = replayed

    def replay(self) -> None:
        self._replayed[self._name] += 1
        self._graph.replay()


class LateTape(Tape):
    """Recorded by its first replay, which spares the interpreter the sizes that a test does not use."""

    def record(self, launch: Callable[[], None]) -> None:
        self._launch: Callable[[], None] | None = launch

    def replay(self) -> None:
        launch, self._launch = self._launch, None
        if launch is None:
            super().replay()
        else:
            self._replayed[self._name] += 1
            super().record(launch)


def _kind_of(launch: Callable[[], None]) -> str:
    assert isinstance(launch, partial)
    return "sharing" if launch.keywords.get("shares") else _KINDS[launch.func.__name__]


class TapeRecorder:
    """Records tapes."""

    def __init__(self, replayed: Counter[str], kind: type[Tape]) -> None:
        self._replayed = replayed
        self._kind = kind

    def record(self, launch: Callable[[], None]) -> Tape:
        tape = self._kind(_kind_of(launch), self._replayed)
        tape.record(launch)
        return tape

    def start(self) -> None:
        """There is no memory to free."""

    def taken(self) -> int:
        return 0


def recorded_graphs(monkeypatch: pytest.MonkeyPatch, *, late: bool = True) -> Counter[str]:
    """Count the graphs that requests replay from now on: "forward", "sharing", "mixed",
    "tree" and "sample".

    Without a GPU, have CPUs that are driven as if they ran behind their host record tapes.

    Args:
        late: record each tape when it is first replayed, and not in advance.
    """
    replayed: Counter[str] = Counter()
    if torch.cuda.is_available():
        record = CudaRecorder.record

        def counted(recorder: CudaRecorder, launch: Callable[[], None]) -> Graph:
            return CountedGraph(record(recorder, launch), _kind_of(launch), replayed)

        def warmed_up(*args: Any) -> None:
            before = replayed.copy()
            warm_up(*args)
            replayed.clear()
            replayed.update(before)

        monkeypatch.setattr(CudaRecorder, "record", counted)
        monkeypatch.setattr("octavo.worker.resident.warm_up.warm_up", warmed_up)
        return replayed
    _record_calls(monkeypatch)
    kind = LateTape if late else Tape
    monkeypatch.setattr(Behind, "recorder", lambda self: TapeRecorder(replayed, kind))
    # An interpreter compiles nothing, so nothing need run before it is recorded.
    monkeypatch.setattr("octavo.worker.resident.replay._is_loaded", lambda *_: True)
    # To visit the objects of all test modules takes half a second, twice for each engine, and garbage harms no tape.
    heap = SimpleNamespace(collect=lambda: 0, freeze=gc.freeze, unfreeze=gc.unfreeze)
    monkeypatch.setattr("octavo.worker.resident.replay.gc", heap)
    return replayed


def interpret_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ranks in threads launch kernels one at a time, since Triton's interpreter has one program index for all."""
    run, launching = InterpretedFunction.run, threading.Lock()

    def alone(kernel: Any, *args: Any, **options: Any) -> None:
        with launching:
            run(kernel, *args, **options)

    monkeypatch.setattr(InterpretedFunction, "run", alone)


class Transfers:
    """Counts what is sent to the device and brought back."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sent: list[int] = []
        self.brought: list[int] = []
        kind: type[Link] = CudaLink if torch.cuda.is_available() else HostLink
        upload, download = kind.upload, kind.download

        def sending(link: Link, array: np.ndarray) -> Tensor:
            self.sent.append(array.nbytes)
            return upload(link, array)

        def bringing(link: Link, tensor: Tensor) -> Any:
            self.brought.append(tensor.nbytes)
            return download(link, tensor)

        monkeypatch.setattr(kind, "upload", sending)
        monkeypatch.setattr(kind, "download", bringing)

    def take(self) -> tuple[int, int]:
        """Uploads and downloads since the last call."""
        counts = len(self.sent), len(self.brought)
        self.sent.clear()
        self.brought.clear()
        return counts
