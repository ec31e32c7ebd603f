"""The worker half: what it has stored comes back, whatever is dropped, stored and read at the same time."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from octavo.core.errors import ConfigError, InvalidRequestError
from octavo.features.host_cache import worker
from octavo.features.host_cache.worker import HostPages
from octavo.worker.hooks import Site

PAGE = 32


def site(page_bytes: int = PAGE, ranks: int = 1, neighbours: int = 1) -> Site:
    blocks = SimpleNamespace(page_bytes=page_bytes)
    return cast("Site", SimpleNamespace(blocks=blocks, rank=0, ranks=ranks, neighbours=neighbours))


def pages_of(places: int = 10, **how: Any) -> HostPages:
    made = HostPages(places * PAGE)
    made.attach(cast("Any", None), site(**how))
    return made


def names(*numbers: int) -> list[bytes]:
    return [number.to_bytes(2, "big") for number in numbers]


def content(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.uint8)[:, None].expand(-1, PAGE).contiguous()


def store(host: HostPages, *numbers: int) -> list[int]:
    return [*host.store(names(*numbers), content(*numbers)).result()]


def load(host: HostPages, *numbers: int) -> tuple[Tensor, list[int]]:
    room = torch.zeros(len(numbers), PAGE, dtype=torch.uint8)
    return room, [*host.load(names(*numbers), lambda: room).result()]


def test_pages_come_back() -> None:
    host = pages_of()
    assert host.call("places", {}) == 10
    assert store(host, 1, 2, 3) == []
    room, missing = load(host, 3, 9, 1)
    assert missing == [1]
    assert torch.equal(room[[0, 2]], content(3, 1))


def test_what_finds_no_place_is_not_kept() -> None:
    host = pages_of()
    assert store(host, *range(8)) == []
    assert store(host, 8, 9, 10, 11) == [2, 3]
    assert load(host, 10, 11)[1] == [0, 1]
    host.call("drop", {"pages": names(0, 77)})
    assert store(host, 12, 13) == [1]
    assert torch.equal(load(host, 9, 12)[0], content(9, 12))


def test_a_page_that_is_stored_again_leaves_its_place() -> None:
    host = pages_of()
    for _ in range(5):
        assert store(host, *range(5)) == []
    assert torch.equal(load(host, *range(5))[0], content(*range(5)))
    assert store(host, *range(5, 10)) == []


def test_a_place_is_not_filled_again_while_it_is_read() -> None:
    host = pages_of()
    store(host, *range(10))
    room, begun, go_on = torch.zeros(2, PAGE, dtype=torch.uint8), threading.Event(), threading.Event()

    def waiting() -> Tensor:
        begun.set()
        assert go_on.wait(60)
        return room

    loading = host.load(names(4, 5), waiting)
    assert begun.wait(60)
    host.call("drop", {"pages": names(3, 4, 5)})
    assert store(host, 20, 21, 22) == [1, 2], "two places are being read"
    go_on.set()
    assert [*loading.result()] == []
    assert torch.equal(room, content(4, 5))
    assert store(host, 21, 22) == []
    assert torch.equal(load(host, 20, 21, 22)[0], content(20, 21, 22))


def test_a_store_ends_before_the_device_is_left() -> None:
    """Else it could keep pages after the engine half had them dropped."""
    host = pages_of()
    storing = [host.store(names(number), content(number)) for number in range(8)]
    host.detach()
    assert all(one.done() for one in storing)
    host.call("drop", {"pages": names(*range(8))})
    host.attach(cast("Any", None), site())
    assert store(host, *range(10)) == []


def test_limits_of_a_container_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "memory", lambda: 40 * PAGE)
    assert pages_of(40).call("places", {}) == 40
    with pytest.raises(ConfigError, match="are for this machine"):
        pages_of(41)
    assert pages_of(80, ranks=4, neighbours=2).call("places", {}) == 20
    with pytest.raises(ConfigError, match="are for this machine"):
        pages_of(84, ranks=4, neighbours=2)


def test_each_rank_has_its_part_of_the_memory() -> None:
    assert pages_of(40, ranks=4).call("places", {}) == 10


def test_too_little_or_too_much_memory() -> None:
    with pytest.raises(ConfigError, match=r"leaves 32 bytes to each rank, but a KV block has 32\. Set at least"):
        pages_of(2, ranks=2)
    with pytest.raises(ConfigError, match=r"\d+\.\d GiB are for this machine, which has \d+\.\d GiB of memory"):
        pages_of(1 << 45)


def test_it_says_what_it_can_be_asked() -> None:
    with pytest.raises(InvalidRequestError, match="has no method 'sort'"):
        pages_of().call("sort", {})


def test_rooms_are_of_some_megabytes() -> None:
    assert HostPages(1).rooms(2 << 20) == (8, 4)
    assert HostPages(1).rooms(64 << 20) == (1, 4)


def test_files_are_there_after_a_restart(tmp_path: Path) -> None:
    host = HostPages(10 * PAGE, tmp_path)
    host.attach(cast("Any", None), site())
    assert (host.call("places", {}), host.call("kept", {})) == (10, [])
    assert store(host, 1, 2) == []
    links = [(names(1)[0], b""), (names(2)[0], names(1)[0])]
    host.call("link", {"links": links})
    host.detach()
    assert host.call("places", {}) == 0
    later = HostPages(10 * PAGE, tmp_path)
    later.attach(cast("Any", None), site())
    assert later.call("kept", {}) == links
    assert torch.equal(load(later, 2, 1)[0], content(2, 1))
