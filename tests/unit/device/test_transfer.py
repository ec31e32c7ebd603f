"""Transfers beside what a device computes. On a GPU it is kept busy, so that nothing is in order by chance."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from octavo.device.transfer import link_of, move

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CYCLES = 50_000_000


def keep_busy() -> None:
    if DEVICE.type == "cuda":
        torch.cuda._sleep(CYCLES)


@pytest.fixture
def arrays() -> list[np.ndarray]:
    rng = np.random.default_rng()
    return [rng.integers(1, 1000, (3, 5), dtype=np.int32) for _ in range(3)]


def test_the_first_values_come_after_what_made_their_place(arrays):
    lane = link_of(DEVICE).stream()
    keep_busy()
    place = torch.zeros(3, 5, dtype=torch.int32, device=DEVICE)
    lane.send(arrays[0], place)
    assert place.tolist() == arrays[0].tolist()


def test_values_stay_until_what_reads_them_has_done_so(arrays):
    lane, place = link_of(DEVICE).stream(), torch.zeros(3, 5, dtype=torch.int32, device=DEVICE)
    read = []
    for array in arrays:
        lane.send(array, place)
        keep_busy()
        read.append(place.clone())
        lane.done()
    assert [values.tolist() for values in read] == [array.tolist() for array in arrays]


def test_tensors_of_several_threads_arrive_whole():
    """More pieces than pinned memory has room for; sizes that pieces don't divide; a view that is not contiguous."""
    drawn = [torch.randint(0, 256, (11 << 20,), dtype=torch.uint8) for _ in range(8)]
    sent = [*(one[: len(one) - i].view(1, -1) for i, one in enumerate(drawn)), drawn[0].view(1024, -1).T, drawn[0][:3]]
    with ThreadPoolExecutor(4) as threads:
        keep_busy()
        arrived = list(threads.map(lambda tensor: move(tensor, DEVICE), sent))
    assert all(torch.equal(there.cpu(), here) for there, here in zip(arrived, sent, strict=True))


def test_a_moved_view_keeps_shape_and_dtype():
    tensor = torch.randn(3 << 20, 2).bfloat16()[1:]
    moved = move(tensor, DEVICE)
    assert (moved.shape, moved.dtype, moved.device.type) == (tensor.shape, tensor.dtype, DEVICE.type)
    assert torch.equal(moved.cpu(), tensor)
