"""Commands whose output goes to a full disk, or nowhere."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from octavo.cli.serve import announce
from octavo.core.terminal import say

FULL = Path("/dev/full")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    with FULL.open("w") as full:
        return subprocess.run([sys.executable, *arguments], stdout=full, stderr=subprocess.PIPE, text=True, check=False)


@pytest.mark.parametrize("arguments", [("--version",), ("--help",), ("pull", "--list")], ids=" ".join)
def test_output_that_can_not_be_written_is_one_line(arguments: tuple[str, ...]) -> None:
    done = run("-m", "octavo.cli.main", *arguments)
    assert done.returncode == 1
    assert done.stderr == "octavo: error: the output can't be written: No space left on device. Make room there.\n"


def test_a_server_goes_on_if_its_log_is_on_a_full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    with FULL.open("w") as out, FULL.open("w") as err:
        monkeypatch.setattr(sys, "stdout", out)
        monkeypatch.setattr(sys, "stderr", err)
        announce("The server is ready.")
        say("KV cache 4 GiB")


def test_lines_that_were_dropped_do_not_change_the_exit_status() -> None:
    """The interpreter flushes its streams at its end, and would exit with 120 if that failed."""
    code = "import sys; from octavo.core.terminal import write_line; write_line('x', sys.stdout)"
    done = run("-c", code)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_streams_are_no_error(closed: str) -> None:
    """Child processes have them open, as this process has afterwards."""
    code = "import subprocess, sys; from octavo.cli.main import main; main(['--version']); "
    code += "sys.exit(subprocess.call([sys.executable, '-c', 'import os; [os.fstat(i) for i in range(3)]']))"
    done = subprocess.run(["sh", "-c", f'exec "$0" -c "$1" {closed}', sys.executable, code], check=False)
    assert done.returncode == 0
