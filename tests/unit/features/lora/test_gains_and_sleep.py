"""Weights that gains are computed from are not freed meanwhile."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from octavo.core.errors import EngineStateError
from octavo.features.lora.gains import BaseNorms

LIMIT_S = 30


def test_a_sleep_waits_for_gains_and_later_ones_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, go, entered = torch.randn(8, 4), threading.Event(), threading.Event()

    def slow(self: BaseNorms, piece: Any, cut: Any) -> Tensor:
        entered.set()
        assert go.wait(LIMIT_S)
        return weight

    monkeypatch.setattr(BaseNorms, "_weight", slow)
    own = SimpleNamespace(rows_of=lambda x: x)
    targets: Any = SimpleNamespace(cuts=[[own]])
    piece: Any = SimpleNamespace(target=0, part=0, scale=2.0)
    norms = BaseNorms(targets, lambda: pytest.fail("the layer has its weights"))
    waits, wait_for = threading.Event(), norms._changed.wait_for
    monkeypatch.setattr(norms._changed, "wait_for", lambda check: waits.set() or wait_for(check))
    a, b, magnitudes = torch.randn(2, 4), torch.randn(8, 2), torch.rand(8)
    with ThreadPoolExecutor(2) as threads:
        gains = threads.submit(norms.gains, piece, a, b, magnitudes)
        assert entered.wait(LIMIT_S)
        closed = threads.submit(norms.close)
        assert waits.wait(LIMIT_S)
        assert not closed.done()
        go.set()
        closed.result(LIMIT_S)
    expected = magnitudes / (weight + 2.0 * b @ a).norm(dim=1)
    assert torch.allclose(gains.result(), expected, atol=1e-5)
    with pytest.raises(EngineStateError, match="The engine sleeps"):
        norms.gains(piece, a, b, magnitudes)
