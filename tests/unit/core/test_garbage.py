from __future__ import annotations

import gc
import time

import pytest

from octavo.core.garbage import Garbage, seldom_collecting


def test_what_exists_is_set_aside_for_the_time_of_the_block_only() -> None:
    before, frozen = gc.get_threshold(), gc.get_freeze_count()
    with seldom_collecting():
        assert gc.isenabled()
        assert gc.get_freeze_count() > frozen + 1000
        assert gc.get_threshold()[0] > 10 * before[0]
    assert (gc.get_threshold(), gc.get_freeze_count()) == (before, 0)


def test_an_engines_garbage_is_collected_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, collections = [100], []
    monkeypatch.setattr(time, "monotonic", lambda: clock[-1])
    garbage = Garbage()
    try:
        garbage.take_over()
        assert not gc.isenabled()
        monkeypatch.setattr(gc, "collect", lambda: collections.append(clock[-1]))
        for now, quiet in ((150, True), (161, False), (162, True), (200, True), (700, False), (763, False)):
            clock.append(now)
            garbage.collect(quiet=quiet)
        assert collections == [162, 763]
    finally:
        gc.enable()
        gc.unfreeze()
