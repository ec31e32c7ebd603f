"""Long texts are worked on in a thread, and what very long ones took is given back."""

from __future__ import annotations

import asyncio
import threading

import pytest

from octavo.text import aside as module
from octavo.text.aside import aside


@pytest.mark.parametrize(("length", "in_thread", "trims"), [(10, False, 0), (100_000, True, 0), (2_000_000, True, 1)])
def test_where_work_is_done_and_what_is_given_back(
    length: int, in_thread: bool, trims: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[threading.Thread] = []
    monkeypatch.setattr(module, "_give_back", lambda: given.append(threading.current_thread()))
    where = asyncio.run(aside(length, threading.current_thread))
    assert (where is not threading.main_thread()) == in_thread
    assert given == [where] * trims


def test_memory_goes_back_also_where_the_work_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[int] = []
    monkeypatch.setattr(module, "_give_back", lambda: given.append(1))

    def fail() -> None:
        raise ValueError("no text")

    with pytest.raises(ValueError, match="no text"):
        asyncio.run(aside(2_000_000, fail))
    assert given == [1]


def test_this_system_takes_memory_back() -> None:
    module._give_back()
