"""Memory that is reserved once, and lent again and again."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.device.rooms import Rooms


class Allocations:
    def __init__(self) -> None:
        self.sizes: list[int] = []

    def __call__(self, size: int) -> Tensor:
        self.sizes.append(size)
        return torch.empty(size, dtype=torch.uint8)


def test_what_is_reserved_is_lent_again_and_never_twice_at_once() -> None:
    made = Allocations()
    rooms = Rooms(made)
    rooms.reserve(100, 2)
    first, second = rooms.lend(60), rooms.lend(100)
    assert (len(first), len(second)) == (60, 100)
    assert first.data_ptr() != second.data_ptr()
    place = first.data_ptr()
    rooms.give_back(first)
    assert rooms.lend(90).data_ptr() == place
    assert made.sizes == [100, 100]


def test_what_was_not_reserved_is_allocated_and_not_kept() -> None:
    made = Allocations()
    rooms = Rooms(made)
    rooms.reserve(100, 1)
    lent = [rooms.lend(101), rooms.lend(100), rooms.lend(1)]
    assert made.sizes == [100, 101, 1]
    for one in lent:
        rooms.give_back(one)
    assert [len(rooms.lend(size)) for size in (100, 101)] == [100, 101]
    assert made.sizes == [100, 101, 1, 101]


def test_the_smallest_fitting_room_is_lent() -> None:
    made = Allocations()
    rooms = Rooms(made)
    rooms.reserve(100, 1)
    rooms.reserve(10, 1)
    rooms.lend(5)
    rooms.lend(100)
    assert made.sizes == [100, 10]
