from __future__ import annotations

import errno
import os
from pathlib import Path

import msgspec
import pytest

from octavo.server.batch.journal import Journal, write_durably


def open_journal(path: Path) -> tuple[Journal, list[tuple[int, bytes]]]:
    found: list[tuple[int, bytes]] = []

    def take(line: bytes, place: int) -> None:
        msgspec.json.decode(line)
        found.append((place, line))

    return Journal.open(path, take), found


def test_records_come_back_as_they_were_appended(tmp_path: Path) -> None:
    journal, found = open_journal(tmp_path / "j")
    assert not found
    places = [journal.append(b'{"a":%d}' % number) for number in range(3)]
    journal.sync()
    assert journal.read(places[1], 7) == b'{"a":1}'
    journal.close()
    journal, found = open_journal(tmp_path / "j")
    assert found == [(place, b'{"a":%d}\n' % number) for number, place in enumerate(places)]
    journal.close()


@pytest.mark.parametrize("cut", range(1, 9))
def test_a_record_that_was_cut_short_never_was(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "j"
    journal, _ = open_journal(path)
    journal.append(b'{"a":0}')
    journal.append(b'{"a":1}')
    journal.close()
    with path.open("r+b") as file:
        file.truncate(16 - cut)
    journal, found = open_journal(path)
    assert [line for _, line in found] == [b'{"a":0}\n']
    journal.append(b'{"a":2}')
    journal.close()
    assert path.read_bytes() == b'{"a":0}\n{"a":2}\n'


@pytest.mark.parametrize("hole", [bytes(8), b'{"a":"\xff"}'], ids=["zeros", "no text"])
def test_what_follows_a_hole_is_cut_off(tmp_path: Path, hole: bytes) -> None:
    """As after a power failure, when later blocks reached the disk and earlier ones did not."""
    path = tmp_path / "j"
    path.write_bytes(b'{"a":0}\n' + hole + b'\n{"a":2}\n')
    journal, found = open_journal(path)
    journal.close()
    assert [line for _, line in found] == [b'{"a":0}\n']
    assert path.read_bytes() == b'{"a":0}\n'


def test_a_full_disk_leaves_the_journal_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "j"
    journal, _ = open_journal(path)
    journal.append(b'{"a":0}')
    real = os.pwrite

    def full(descriptor: int, data: bytes, place: int) -> int:
        if len(data) < 5:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(descriptor, data[:5], place)

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OSError, match="No space"):
        journal.append(b'{"a":1}')
    monkeypatch.undo()
    assert path.read_bytes() == b'{"a":0}\n'
    journal.append(b'{"a":2}')
    journal.close()
    assert path.read_bytes() == b'{"a":0}\n{"a":2}\n'


def test_a_file_is_replaced_as_a_whole(tmp_path: Path) -> None:
    path = tmp_path / "f"
    write_durably(path, b"one")
    write_durably(path, b"two")
    assert path.read_bytes() == b"two"
    assert [one.name for one in tmp_path.iterdir()] == ["f"]
