"""Launchers of Triton's kernels stay apart when several are loaded."""

from __future__ import annotations

from types import ModuleType

import pytest

pytest.importorskip("triton")

from triton.runtime import build

from octavo.device.launchers import separate_launchers


def test_a_module_that_is_loaded_again_leaves_those_of_others_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    shared = ModuleType("__triton_launcher")

    def load(name: str, path: str) -> ModuleType:
        """As Python does with a C module of the same name."""
        shared.launch = path
        return shared

    monkeypatch.setattr(build, "_load_module_from_path", load)
    separate_launchers.__wrapped__()
    first, second = (build._load_module_from_path(shared.__name__, path) for path in ("one", "other"))
    assert (first.launch, second.launch) == ("one", "other")
