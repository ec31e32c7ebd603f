"""Which kernels in Triton are compiled ahead; a stand-in of the compiler replaces the interpreter's launches."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from triton.runtime.interpreter import InterpretedFunction

from octavo.features.lora import ahead


def collected(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the names of kernels, to which those are added that are launched to be compiled."""
    launched: list[str] = []

    class Collector:
        def __init__(self, target: object) -> None:
            pass

        @contextmanager
        def collecting(self) -> Iterator[None]:
            with monkeypatch.context() as patched:
                patched.setattr(InterpretedFunction, "run", lambda self, *_, **__: launched.append(self.fn.__name__))
                yield

        def wait(self) -> int:
            return len(launched)

    monkeypatch.setattr(ahead, "Ahead", Collector)
    monkeypatch.setattr(ahead, "target_of", lambda device: None)
    return launched
