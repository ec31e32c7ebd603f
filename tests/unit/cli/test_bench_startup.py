"""`octavo bench startup`: the parent's clock runs from before exec until the child says that it is ready."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from octavo.cli.bench import startup

CHILD = """#!/bin/sh
echo "weights: 1 of 2"
echo 'ready: {"engine_seconds": 1.5, "phases": {"weights": 1.5}}'
echo "closed" > "$(dirname "$0")/closed"
exit STATUS
"""


@pytest.fixture
def child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes the child a script that ends with the given status."""

    def make(status: int) -> None:
        script = tmp_path / "python"
        script.write_text(CHILD.replace("STATUS", str(status)))
        script.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(script))

    return make


def test_the_start_counts_from_exec(
    child: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    child(0)
    # Read before the child starts and when its line comes; cold, then warm.
    clock = iter([10.0, 14.25, 20.0, 22.5])
    monkeypatch.setattr(startup.time, "perf_counter", lambda: next(clock))
    assert startup.run(["--num-iters", "1", "--output-json", str(tmp_path / "found.json")]) == 0
    shown = capsys.readouterr()
    assert "Ready after 4.25 s with empty kernel caches, 2.50 s with full ones" in shown.out
    assert "4.25 s (Python and imports 2.75, weights 1.50)" in shown.err
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["cold"] == {"ready_seconds": 4.25, "engine_seconds": 1.5, "phases": {"weights": 1.5}}


def test_a_child_that_fails_ends_the_command(child: Any) -> None:
    child(3)
    with pytest.raises(SystemExit) as ended:
        startup.run(["--num-iters", "1"])
    assert ended.value.code == 3
