"""Layers whose weights come into two rooms, in turns: with copies that end as early and as late as they may."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from paged import PagedRunner
from tiny import load_model, make_checkpoint, model_files, reference_of
from torch import Tensor, nn

from octavo.build_worker import build_local
from octavo.config import EngineConfig, ParallelConfig
from octavo.core.errors import ConfigError, UnsupportedError
from octavo.core.worker_info import RankPlace
from octavo.device.transfer import HostFeed, HostLink
from octavo.hub.files import ModelFiles
from octavo.models.decoder import CausalLM
from octavo.models.load import open_checkpoint
from octavo.models.load.arranged import arranged
from octavo.models.load.weights import load_weights, wanted_bytes, weight_layers
from octavo.models.registry import build_model, spec_of
from octavo.worker.offload import Offload, freed_by, offload_of, settings_beside, spread
from octavo.worker.weights import WorkerWeights
from octavo.worker.worker import Worker

CPU = torch.device("cpu")
LAYERS = 5
FREE = 1 << 40


class Late:
    """A feed whose copies end when they are waited for, and not before."""

    def __init__(self) -> None:
        self.room = HostFeed().room
        self.count = 0

    def send(self, loads: Sequence[tuple[Tensor, Tensor]]) -> Late.Copies:
        self.count += 1
        return self.Copies(loads)

    class Copies:
        def __init__(self, loads: Sequence[tuple[Tensor, Tensor]]) -> None:
            self._loads = loads

        def wait(self, stream: Any = None) -> None:
            HostFeed().send(self._loads)


class Link(HostLink):
    def __init__(self, feed: Any) -> None:
        super().__init__(CPU)
        self.feed = lambda: feed  # type: ignore[method-assign]


def unloaded(files: ModelFiles) -> CausalLM:
    spec = spec_of(files.config)
    return build_model(spec, dtype=torch.float32, device=CPU, attention=reference_of(files))


def offloaded(files: ModelFiles, freed: int, feed: Any) -> tuple[CausalLM, Offload]:
    """A model with weights, as few of its layers offloaded as free this number of bytes."""
    model = unloaded(files)
    offload = offload_of(model, wanted_bytes, freed / 2**30, Link(feed), FREE, 1)
    load_weights(model, arranged(open_checkpoint(files), model.spec), placed=offload.put_away)
    offload.begin()
    return model, offload


def logits(model: CausalLM) -> list[Tensor]:
    """Of a prompt in two chunks, and of a token after it."""
    runner = PagedRunner(model, num_blocks=16, block_size=4)
    row = runner.row([3 + 7 * i % 190 for i in range(20)], 20)
    return [runner.step([row], [count], all_logits=True) for count in (11, 8, 1)]


def checkpoint(family: str, folder: Path, **changes: Any) -> ModelFiles:
    make_checkpoint(family, folder, changes)
    return model_files(folder)


@pytest.mark.parametrize(
    ("family", "changes"), [("llama", {"num_hidden_layers": LAYERS}), ("llama4", {}), ("lfm2", {})]
)
@pytest.mark.parametrize("feed", [HostFeed, Late], ids=["early", "late"])
def test_logits_are_those_of_the_resident_model(
    family: str, changes: dict[str, Any], feed: Callable[[], Any], tmp_path: Path
) -> None:
    files = checkpoint(family, tmp_path, **changes)
    expected = logits(load_model(files, reference_of(files)))
    model, _ = offloaded(files, 1, feed())
    assert sum(any(one.offloaded for one in weight_layers(layer)) for layer in model.layers) >= 3
    for found, wanted in zip(logits(model), expected, strict=True):
        assert torch.equal(found, wanted)


def test_each_pass_copies_each_layer_once(tmp_path: Path) -> None:
    files = checkpoint("llama", tmp_path, num_hidden_layers=LAYERS)
    feed = Late()
    model, _ = offloaded(files, int(2.5 * wanted_bytes(unloaded(files).layers[0])), feed)
    logits(model)
    assert feed.count == 3 * LAYERS


def test_some_of_the_layers_compute_between_whole_passes(tmp_path: Path) -> None:
    files = checkpoint("llama", tmp_path, num_hidden_layers=LAYERS)
    whole = load_model(files, reference_of(files))
    model, _ = offloaded(files, 1, Late())
    with whole.in_few_layers():
        few = logits(whole)
    with model.in_few_layers():
        for found, wanted in zip(logits(model), few, strict=True):
            assert torch.equal(found, wanted)
    for found, wanted in zip(logits(model), logits(whole), strict=True):
        assert torch.equal(found, wanted)


def test_memory_is_freed_as_the_layers_are_loaded(tmp_path: Path) -> None:
    files = checkpoint("llama", tmp_path, num_hidden_layers=LAYERS)
    model = unloaded(files)
    offload = offload_of(model, wanted_bytes, 1 / 2**30, Link(HostFeed()), FREE, 1)
    load_weights(model, arranged(open_checkpoint(files), model.spec), placed=offload.put_away)
    away = [layer for layer in model.layers if tensors(layer)]
    assert len(away) == 3
    assert not any(one.untyped_storage().nbytes() for layer in away for one in tensors(layer))
    assert offload.freed == freed_by([wanted_bytes(layer) for layer in away])
    offload.begin()
    rooms = {one.untyped_storage().data_ptr() for layer in away for one in tensors(layer)}
    assert len(rooms) == 2


def tensors(layer: nn.Module) -> list[Tensor]:
    """Of what a layer does not share with others."""
    holders = (holder for one in weight_layers(layer) if one.offloaded for holder in one.holders)
    return [value for holder in holders for value in vars(holder).values() if isinstance(value, Tensor)]


@given(st.lists(st.integers(1, 50), min_size=1, max_size=40), st.integers(1, 400))
def test_layers_are_spread_and_as_few_as_suffice(sizes: list[int], freed: int) -> None:
    chosen = spread(sizes, freed)
    if not chosen:
        assert freed_by(sizes) < freed
        return
    assert freed_by([sizes[i] for i in chosen]) >= freed
    assert len(chosen) > 2
    gaps = [after - before for before, after in zip([-1, *chosen], chosen, strict=False)]
    assert max(gaps) - min(gaps) <= 1
    assert chosen[-1] == len(sizes) - 1


def test_more_than_the_layers_can_free(tmp_path: Path) -> None:
    model = unloaded(checkpoint("llama", tmp_path))
    with pytest.raises(ConfigError, match=re.escape("--cpu-offload-gb 7: all 3 layers, without the room of 2 that")):
        offload_of(model, wanted_bytes, 7, Link(HostFeed()), FREE, 1)


def test_more_than_the_host_has(tmp_path: Path) -> None:
    model = unloaded(checkpoint("llama", tmp_path))
    with pytest.raises(ConfigError, match=r"the weights of 3 layers take 6.00 GiB of the host's memory, and 3.00 GiB"):
        offload_of(model, lambda layer: 2 << 30, 1, Link(HostFeed()), 3 << 30, 1)


@pytest.mark.parametrize("per_node", [1, 2, 4])
def test_ranks_of_one_machine_share_the_hosts_memory(per_node: int, tmp_path: Path) -> None:
    """The three layers' weights fit two times, not four times."""
    model = unloaded(checkpoint("llama", tmp_path))
    away = 3 * wanted_bytes(model.layers[0])
    place = RankPlace(1, 4, per_node=per_node)
    worker: Any = SimpleNamespace(place=place, device=Link(HostFeed()), _host_free=2 * away, _offload_gib=1 / 2**30)
    if per_node < 4:
        assert Worker._begin_offload(worker, model, 1.0) == worker.offload.freed
        return
    with pytest.raises(ConfigError, match=r"of the host's memory for each of 4 GPUs, and"):
        Worker._begin_offload(worker, model, 1.0)


def test_models_without_layers_of_octavo() -> None:
    model: Any = nn.Identity()
    with pytest.raises(ConfigError, match="layers of this model are not Octavo's own"):
        offload_of(model, wanted_bytes, 1, Link(HostFeed()), FREE, 1)


def test_a_cpu_has_nothing_to_free(tmp_path: Path) -> None:
    files = checkpoint("llama", tmp_path)
    with pytest.raises(ConfigError, match=r"--cpu-offload-gb 2 frees memory of an NVIDIA GPU"):
        build_local(EngineConfig.of(device="cpu", cpu_offload_gb=2.0), files)


def test_steps_in_two_parts_are_refused_or_left_out() -> None:
    device: Any = type("Gpu", (), {"resident": True})()
    assert settings_beside(0, ParallelConfig(enable_dbo=True), device).enable_dbo
    assert settings_beside(1, ParallelConfig(), device).enable_dbo is False
    with pytest.raises(ConfigError, match="--enable-dbo computes each layer twice"):
        settings_beside(1, ParallelConfig(enable_dbo=True), device)


def test_weights_in_the_host_are_not_replaced() -> None:
    worker: Any = type("Worker", (), {"offload": object()})()
    weights = WorkerWeights(worker)
    for update in (weights.begin, lambda: weights.stage(None)):
        with pytest.raises(UnsupportedError, match="--cpu-offload-gb"):
            update()
