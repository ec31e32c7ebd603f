"""Pages in files: what was stored and linked is there after a restart, and nothing else."""

from __future__ import annotations

import errno
import os
import random
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from octavo.core.errors import ConfigError
from octavo.features.host_cache import files
from octavo.features.host_cache.files import Files

PAGE = 32


def name(number: int) -> bytes:
    return number.to_bytes(34, "big")


def content(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.uint8)[:, None].expand(-1, PAGE).contiguous()


def store(host: Files, *numbers: int) -> list[int]:
    return [*host.store([name(number) for number in numbers], content(*numbers))]


def link(host: Files, *numbers: int) -> None:
    """Each continues the one before."""
    names = [name(number) for number in numbers]
    host.link([*zip(names, [b"", *names[:-1]], strict=True)])


def load(host: Files, *numbers: int) -> tuple[Tensor, list[int]]:
    room = torch.zeros(len(numbers), PAGE, dtype=torch.uint8)
    return room, [*host.load(host.places.read([name(number) for number in numbers]), lambda: room)]


def opened(folder: Path, count: int = 10, page_bytes: int = PAGE, rank: int = 0, ranks: int = 1) -> Files:
    return Files(folder, rank, ranks, count, page_bytes)


def again(host: Files, folder: Path, **how: int) -> Files:
    host.close()
    return opened(folder, **how)


@pytest.fixture
def host(tmp_path: Path) -> Files:
    return opened(tmp_path)


def test_what_was_linked_is_there_after_a_restart(host: Files, tmp_path: Path) -> None:
    assert host.kept() == []
    assert store(host, 5, 1, 3) == []
    link(host, 5, 3)
    later = again(host, tmp_path)
    assert later.kept() == [(name(5), b""), (name(3), name(5))]
    room, missing = load(later, 3, 1, 5)
    assert missing == [1], "it was not linked"
    assert torch.equal(room[[0, 2]], content(3, 5))
    assert store(later, *range(20, 28)) == []
    assert store(later, 28) == [0], "no place is free"


def test_a_process_that_is_killed_leaves_names_with_their_pages(host: Files, tmp_path: Path) -> None:
    """Nothing is closed; the lock goes with the process."""
    store(host, 1, 2)
    link(host, 1, 2)
    store(host, 3)
    host.places.drop([name(2)])
    os.close(host._names)
    later = opened(tmp_path)
    assert later.kept() == [(name(1), b"")]
    assert torch.equal(load(later, 1)[0], content(1))


def test_a_place_that_is_filled_again_has_no_name_before_it_is_linked(host: Files, tmp_path: Path) -> None:
    store(host, *range(10))
    link(host, *range(10))
    host.places.drop([name(4)])
    assert store(host, 44) == []
    later = again(host, tmp_path)
    assert [page for page, _ in later.kept()] == [name(i) for i in range(10) if i != 4]


def test_a_page_that_is_stored_again_leaves_its_place(host: Files, tmp_path: Path) -> None:
    store(host, 1)
    link(host, 1)
    store(host, 1)
    assert again(host, tmp_path).kept() == [], "its new place is not linked"


def test_two_engines_have_files_of_their_own(host: Files, tmp_path: Path) -> None:
    store(host, 1)
    link(host, 1)
    other = opened(tmp_path)
    assert other.kept() == []
    store(other, 2)
    link(other, 2)
    assert opened(tmp_path, rank=1, ranks=2).kept() == []
    later = again(host, tmp_path)
    assert later.kept() == [(name(1), b"")]
    assert again(other, tmp_path).kept() == [(name(2), b"")]


def test_other_sizes(host: Files, tmp_path: Path) -> None:
    store(host, *range(10))
    link(host, *range(10))
    smaller = again(host, tmp_path, count=4)
    assert len(smaller.kept()) == 4
    assert (tmp_path / "rank0of1-0.pages").stat().st_size == 4 * PAGE
    larger = again(smaller, tmp_path, count=20)
    assert len(larger.kept()) == 4
    assert store(larger, *range(100, 116)) == []
    assert again(larger, tmp_path, page_bytes=64).kept() == [], "pages of another model"
    assert (tmp_path / "rank0of1-0.names").stat().st_mode & 0o777 == 0o600


def test_a_page_that_has_changed_is_not_there(host: Files, tmp_path: Path) -> None:
    store(host, 1, 2)
    link(host, 1, 2)
    later = again(host, tmp_path)

    def damage(place: int) -> None:
        os.pwrite(later._pages, b"x", place * PAGE + 7)

    later.places.visit(name(2), damage)
    assert load(later, 1, 2)[1] == [1]
    os.ftruncate(later._pages, 0)
    assert load(later, 1)[1] == [0]


def test_a_full_disk_keeps_what_it_can(host: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    write, written = os.pwrite, []

    def limited(file: int, data: memoryview, at: int) -> int:
        if file == host._pages and len(written) >= 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        written.append(at)
        return write(file, data[:20], at)

    monkeypatch.setattr(os, "pwrite", limited)
    assert store(host, 1, 2, 3) == [1, 2], "pages are written in two parts"
    monkeypatch.setattr(os, "pwrite", write)
    assert torch.equal(load(host, 1)[0], content(1))
    assert store(host, *range(20, 29)) == []


def test_folders_that_can_not_be_used(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"--kv-offloading-path .*file: .*\. Name a writable folder"):
        opened(tmp_path / "file")
    with pytest.raises(ConfigError, match=r"GiB are needed, .* GiB free\. Set a smaller --kv-offloading-size"):
        opened(tmp_path / "made", count=1 << 60)
    opened(tmp_path / "made", count=1)
    assert [path.name for path in (tmp_path / "made").iterdir() if path.suffix == ".names"] == ["rank0of1-0.names"]


def test_too_many_engines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_MOST_ENGINES", 2)
    for _ in range(2):
        opened(tmp_path)
    with pytest.raises(ConfigError, match=r"2 engines use it\. Name another folder"):
        opened(tmp_path)


@given(st.integers(0, 1 << 32), st.lists(st.sampled_from(["store", "link", "drop", "restart"]), max_size=40))
def test_any_order_of_stores_links_drops_and_restarts(
    tmp_path_factory: pytest.TempPathFactory, seed: int, steps: list[str]
) -> None:
    rng, folder = random.Random(seed), tmp_path_factory.mktemp("pages")
    host = opened(folder)
    there: dict[int, int] = {}
    linked: dict[int, int] = {}
    for step in steps:
        some = rng.sample(range(14), rng.randrange(1, 5))
        if step == "store":
            versions = [rng.randrange(256) for _ in some]
            failed = [*host.store([name(one) for one in some], content(*versions))]
            for i, (one, version) in enumerate(zip(some, versions, strict=True)):
                if i not in failed:
                    there[one] = version
                    linked.pop(one, None)
        elif step == "link":
            host.link([(name(one), b"") for one in some])
            linked |= {one: there[one] for one in some if one in there}
        elif step == "drop":
            host.places.drop([name(one) for one in some])
            for one in some:
                there.pop(one, None)
                linked.pop(one, None)
        else:
            host = again(host, folder)
            there = dict(linked)
            assert {page for page, _ in host.kept()} == {name(one) for one in linked}
        asked = [*range(14)]
        room, missing = load(host, *asked)
        assert set(missing) == {one for one in asked if one not in there}
        for one, version in there.items():
            assert torch.equal(room[one], content(version)[0])
    host.close()
