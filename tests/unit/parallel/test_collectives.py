"""Collectives of torch's process groups. Warnings are errors here, so no operation may have a deprecated name."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
import torch.distributed

from octavo.parallel import collectives
from octavo.parallel.collectives import TorchCollectives


@pytest.fixture
def alone() -> Iterator[TorchCollectives]:
    """A group of one process."""
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield TorchCollectives(later=True)
    torch.distributed.destroy_process_group()


def test_a_group_of_one_gives_back_what_it_has(alone: TorchCollectives) -> None:
    x = torch.arange(6.0).reshape(3, 2)
    begun = alone.begin_sum(x.clone())
    assert begun is not None
    assert torch.equal(begun.total(), x)
    assert torch.equal(alone.all_reduce(x.clone()), x)
    assert torch.equal(alone.all_gather(x), x[None])
    assert torch.equal(torch.stack(alone.all_to_all(x, [3], [3])), x[None])
    assert torch.equal(alone.reduce_scatter(x[None]), x)


@pytest.mark.parametrize("names", [["new", "old"], ["new"], ["old"]])
def test_the_new_name_of_an_operation_comes_first(names: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    operations = SimpleNamespace(**{name: name for name in names})
    monkeypatch.setattr(collectives.torch, "distributed", operations)
    assert collectives._renamed("new", "old") == names[0]
