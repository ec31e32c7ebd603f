"""Folders of processes that were killed are removed by the next one; those of living ones never are."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from octavo.engine.connections import listen_at
from octavo.engine.socket_folder import SocketFolder

_OWNER = """
import sys
from octavo.engine.socket_folder import SocketFolder
folder = SocketFolder()
(folder.path / "core.sock").touch()
print(folder.path, flush=True)
sys.stdin.read()
"""


class Owner:
    """Another process with a folder."""

    def __init__(self, temporary: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", _OWNER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "TMPDIR": str(temporary)},
        )
        assert self.process.stdout is not None
        self.folder = Path(self.process.stdout.readline().strip())

    def kill(self) -> None:
        """SIGKILL: it can clean up nothing."""
        with self.process:
            self.process.kill()


@pytest.fixture
def temporary(short_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("tempfile.tempdir", str(short_path))
    return short_path


def test_only_the_folders_of_the_dead_are_removed(temporary: Path) -> None:
    owners = [Owner(temporary) for _ in range(3)]
    assert all((owner.folder / "core.sock").exists() for owner in owners)
    owners[0].kill()
    owners[1].kill()
    folder = SocketFolder()
    assert set(temporary.iterdir()) == {owners[2].folder, folder.path}
    assert (owners[2].folder / "core.sock").exists()
    folder.remove()
    owners[2].kill()
    assert list(temporary.iterdir()) == [owners[2].folder]


def test_what_is_not_known_to_be_dead_stays(temporary: Path) -> None:
    """Such as a folder that is just being made, whose lock has no name yet, and one that only looks like ours."""
    for name in ("octavo-new", "octavo-native-1000"):
        (temporary / name).mkdir()
    (temporary / "octavo-new" / "owner.new").touch()
    elsewhere = temporary / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "owner").touch()
    (temporary / "octavo-link").symlink_to(elsewhere)
    before = set(temporary.rglob("*"))
    SocketFolder().remove()
    assert set(temporary.rglob("*")) == before


def test_a_folder_is_removed_with_all_that_is_in_it(temporary: Path) -> None:
    folder = SocketFolder()
    (folder.path / "board").touch()
    folder.remove()
    folder.remove()
    assert list(temporary.iterdir()) == []


def test_its_path_is_short_wherever_temporary_files_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(long))
    folder = SocketFolder()
    try:
        listen_at(str(folder.path / "api-1000.sock")).close()
    finally:
        folder.remove()
    assert not folder.path.exists()
