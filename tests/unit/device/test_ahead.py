"""Which launches are compiled ahead: each variant once, nothing launched. The compiler itself is left out."""

from __future__ import annotations

from concurrent.futures import Executor, Future
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from triton.runtime.jit import JITFunction

from octavo.device.ahead import Ahead


class InOrder(Executor):
    """Runs each job when it is submitted."""

    def submit(self, function: Any, /, *args: Any, **options: Any) -> Future[Any]:
        found: Future[Any] = Future()
        found.set_result(function(*args, **options))
        return found


class Kernel:
    fn = SimpleNamespace(__module__=__name__, __name__="nobody")
    params = tuple(SimpleNamespace(is_constexpr=False, do_not_specialize=last) for last in (False, False, True))


KERNEL = Kernel()


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    calls: list[tuple[Any, ...]] = []

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        assert kernel is KERNEL
        assert warmup
        calls.append((args, options))

    monkeypatch.setattr(JITFunction, "run", run)
    return calls


def launch(*args: Any, **options: Any) -> None:
    JITFunction.run(KERNEL, *args, grid=(3,), warmup=False, **options)


def test_a_variant_is_compiled_once(compiled):
    before = JITFunction.run
    ahead = Ahead(("cuda", 90, 32))
    x = torch.empty(64)
    with ahead.collecting():
        launch(x, 32, 5, BLOCK=4)
        launch(torch.empty(7), 48, 6, BLOCK=4)  # other addresses and sizes of the same kind
        launch(x, 33, 5, BLOCK=4)
        launch(x, 1, 5, BLOCK=4)
        launch(x, 32, 5, BLOCK=8)
        launch(x.to(torch.float16), 32, 5, BLOCK=4)
        launch(x[1:], 32, 5, BLOCK=4)
    assert JITFunction.run is before
    assert ahead.wait() == len(compiled) == 6


def test_no_memory_is_held_while_it_compiles(compiled):
    ahead = Ahead(("cuda", 90, 32))
    with ahead.collecting():
        launch(torch.empty(64), 32, 5)
    ahead.wait()
    ((stand_in, *_), _) = compiled[0]
    assert not isinstance(stand_in, torch.Tensor)
    assert stand_in.dtype == torch.float32


def test_a_failed_compilation_is_told_and_harms_no_other(monkeypatch, caplog):
    def run(kernel: Any, *args: Any, **options: Any) -> None:
        raise ValueError("no such instruction")

    monkeypatch.setattr(JITFunction, "run", run)
    ahead = Ahead(("cuda", 90, 32))
    with ahead.collecting():
        launch(torch.empty(64), 32, 5)
        launch(torch.empty(64), 33, 5)
    assert ahead.wait() == 2
    assert caplog.text.count("no such instruction") == 2


def test_processes_that_compile_the_same_begin_with_different_launches(compiled):
    """Each compiles all in the end, since another process may have failed."""
    for number in (0, 1):
        compiled.clear()
        ahead = Ahead(("cuda", 90, 32), (number, 2))
        ahead._pool.shutdown()
        ahead._pool = InOrder()
        with ahead.collecting():
            for size in (1, 2, 4, 8):
                launch(torch.empty(64), 32, 5, BLOCK=size)
        assert ahead.wait() == 4
        sizes = [options["BLOCK"] for _, options in compiled]
        assert sizes == ([1, 4, 2, 8] if number == 0 else [2, 8, 1, 4])
