"""A GPU's context is created early only where torch will use it; the kind of device is known before torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from octavo.device import early

SCRIPT = """
import sys
from pathlib import Path
from octavo.device import early
early.DRIVER = Path(sys.argv[2])
thread = early.begin_context(sys.argv[1])
if thread is not None:
    thread.join()
print(thread is not None, "torch" in sys.modules)
"""


@pytest.mark.parametrize(
    ("device", "driver", "begins"),
    [("cuda", "/", True), ("auto", "/", True), ("cpu", "/", False), ("cuda", "/none", False)],
)
def test_a_context_begins_where_there_is_a_driver(device: str, driver: str, begins: bool) -> None:
    """Without the driver's library, or a GPU, the thread ends."""
    pytest.importorskip("triton")
    done = subprocess.run([sys.executable, "-c", SCRIPT, device, driver], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(begins), "False"]


def test_no_context_begins_once_torch_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its user may have chosen another GPU."""
    monkeypatch.setattr(early, "DRIVER", Path("/"))
    import torch  # noqa: F401

    assert early.begin_context("cuda") is None


@pytest.mark.parametrize(
    ("device", "driver", "expected"),
    [("cpu", "/", True), ("auto", "/", False), ("auto", "/none", True), ("cuda", "/none", False)],
)
def test_without_a_driver_auto_is_the_cpu(
    device: str, driver: str, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(early, "DRIVER", Path(driver))
    assert early.is_cpu(device) is expected
