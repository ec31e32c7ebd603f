"""Memory in large pages: the same tensors as elsewhere, none on top of another, on pages the system was told of."""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor

from octavo.nn import pages
from octavo.nn.pages import LargePages
from octavo.nn.weights import fused

LINE = 64


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "_CHUNK", 1 << 14)


def some(rows: int, dtype: torch.dtype, *rest: int) -> Tensor:
    return torch.randint(0, 100, (rows, *rest), generator=torch.Generator().manual_seed(rows)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
@pytest.mark.parametrize("rows", [(1,), (7,), (16, 4, 4), (300, 300)])  # the last are larger than a chunk
def test_parts_lie_one_below_the_other_as_elsewhere(dtype: torch.dtype, rows: tuple[int, ...]) -> None:
    parts = [some(count, dtype, 5, 11) for count in rows]
    kept = LargePages().keep(parts)
    assert kept.is_contiguous()
    assert kept.dtype == dtype
    assert torch.equal(kept, fused(parts))


def test_what_is_kept_owes_nothing_to_its_source() -> None:
    source = some(4, torch.float32, 6).t()  # nor to how that lies in memory
    before = source.clone()
    kept = LargePages().keep([source])
    source.zero_()
    assert kept.is_contiguous()
    assert torch.equal(kept, before)


def test_tensors_of_many_threads_lie_beside_each_other_on_cache_lines() -> None:
    memory = LargePages()
    sources = [some(count, torch.bfloat16, 3) for count in range(1, 200)]
    with ThreadPoolExecutor(4) as pool:
        kept = list(pool.map(lambda source: memory.keep([source]), sources))
    assert all(map(torch.equal, kept, sources))
    places = sorted((tensor.data_ptr(), tensor.nbytes) for tensor in kept)
    assert all(address % LINE == 0 for address, _ in places)
    assert all(a + size <= b for (a, size), (b, _) in itertools.pairwise(places))


@pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage/enabled").exists(), reason="a system without transparent large pages"
)
def test_the_system_is_told_to_use_large_pages() -> None:
    kept = LargePages().keep([some(8, torch.uint8, 64)])
    assert "hg" in flags_at(kept.data_ptr())


def flags_at(address: int) -> list[str]:
    """Of this process's memory there, in the kernel's abbreviations."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, *rest = line.split()
        if "-" in name and ":" not in name:
            begin, end = (int(number, 16) for number in name.split("-"))
            inside = begin <= address < end
        elif inside and name == "VmFlags:":
            return rest
    raise AssertionError("no memory there")
