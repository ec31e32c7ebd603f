"""A model and the worker half of adapters on it, driven by hand: pages are loaded at once, steps are laid out here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from paged import PagedRunner, Row
from torch import Tensor

from octavo.core.cache_groups import CacheGroup
from octavo.core.plan import PlanDraft
from octavo.device.cpu import CpuDevice
from octavo.features.lora.checks import read_adapter
from octavo.features.lora.layout import joined, layout
from octavo.features.lora.payload import AdapterEntry, LoraStep, Source, page_names
from octavo.features.lora.worker import LoraWorker
from octavo.hub.files import ModelFiles
from octavo.models.decoder import CausalLM
from octavo.models.load import open_checkpoint
from octavo.models.model import EncoderModel, Model
from octavo.nn.attention.base import AttentionBackend
from octavo.nn.build import Build
from octavo.nn.quant.base import everywhere
from octavo.nn.quant.none import Unquantized
from octavo.worker.attention import common_page, own_shapes
from octavo.worker.blocks import Blocks
from octavo.worker.hooks import Site

BASE = -1
FORMS = pytest.mark.parametrize("by_output", [False, True], ids=["by rank", "by output"])
"""Both forms of B."""
ALL_FORMS_NIGHTLY = pytest.mark.parametrize(
    "by_output", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["by rank", "by output"]
)


def kernels_on_any_machine(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Without a GPU, compile the adapters' CUDA kernels for the CPU, in a folder."""
    if torch.cuda.is_available():
        return
    pytest.importorskip("triton")  # which their module imports
    from cuda_on_cpu import EmulatedKernel

    from octavo.features.lora import kernels

    EmulatedKernel.folder = folder
    monkeypatch.setattr(kernels, "Kernel", EmulatedKernel)
    monkeypatch.setattr(kernels, "_kernel", kernels._kernel.__wrapped__)


class ByOutput(LoraWorker):
    """Has B in the form of GPUs, which torch can read on any device."""

    def attach(self, model: Model | EncoderModel, site: Site) -> None:
        super().attach(model, site)
        self._geometry = replace(self._geometry, by_output=True)
        self._reader = replace(self._reader, geometry=self._geometry)


@dataclass
class Adapted:
    """A model on random blocks of one KV cache, which adapters share with its rows.

    Attributes:
        by_output: B is in the form of GPUs; see `Geometry`.
        indices: adapters in use -> their index.
    """

    model: CausalLM
    files: ModelFiles
    num_blocks: int = 400
    block_size: int = 4
    dtype: torch.dtype = torch.float32
    kv_dtype: torch.dtype = torch.float32
    max_rank: int = 64
    added_tokens: int = 0
    seed: int = 0
    by_output: bool = False
    indices: dict[Any, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.worker = (ByOutput if self.by_output else LoraWorker)(16, self.max_rank, self.added_tokens)
        self.attach()

    def attach(self) -> None:
        """Bind a new cache to the model, and the worker half to both."""
        layers, device = self.model.cached_layers, CpuDevice()
        groups = [CacheGroup(layers=tuple(range(len(layers))))]  # rows have one block table here
        self.runner = PagedRunner(self.model, self.num_blocks, self.block_size, self.seed)
        backend, own = layers[0].backend, []
        shape = backend.cache_shape(layers[0].spec, self.num_blocks, self.block_size)
        if page := common_page(layers, backend, self.block_size):
            shape, own = (self.num_blocks, page), own_shapes(layers, backend, self.num_blocks, self.block_size)
        self.blocks = Blocks(layers, groups, shape, self.block_size, self.kv_dtype, device, own)
        self.blocks.memory.fill_(255)  # NaN, if it is read as floating point
        make = everywhere(Unquantized, self.dtype, device.torch_device)
        build = Build(self.dtype, device.torch_device, layers[0].backend, make)
        self.worker.attach(self.model, Site(build, lambda: open_checkpoint(self.files), device, self.blocks))
        self.worker.buffers(64, 256)
        self.indices.clear()

    def enter(self, *paths: Path, weights: Sequence[float] = (), uid: int | None = None) -> LoraStep:
        """Load an adapter, or the weighted sum of several, and use it under the next index."""
        targets = self.worker._targets.targets
        manifests = [read_adapter(path, targets, self.max_rank, self.added_tokens).manifest for path in paths]
        given = weights or [1.0] * len(paths)
        sources = [Source(str(path), *rest) for path, *rest in zip(paths, manifests, given, strict=True)]
        whole = joined(manifests) if len(paths) > 1 else manifests[0]
        index = len(self.indices)
        uid = index + 1 if uid is None else uid
        self.worker.call("read", {"uid": uid, "sources": sources, "manifest": whole}).result()
        placed = layout(targets, whole, self.worker._geometry)
        blocks = [self.runner.free.pop() for _ in range(placed.num_blocks)]
        pages = torch.empty(len(blocks), self.blocks.page_bytes, dtype=torch.uint8)
        names, half = page_names(uid, len(blocks)), -(-len(blocks) // 2)
        for part in (slice(half), slice(half, None)) if len(blocks) > 1 else (slice(None),):
            assert not self.worker.load(names[part], partial(pages.__getitem__, part)).result()
        self.blocks.scatter(blocks, pages)
        self.indices[paths if len(paths) > 1 else paths[0]] = index
        kind = {"general": whole.general(targets), "experts": whole.changes_experts(targets)}
        return LoraStep([AdapterEntry(index, uid, blocks)], **kind)

    def step(
        self, rows: Sequence[Row], counts: Sequence[int], payload: LoraStep, *, all_logits: bool = False
    ) -> Tensor:
        """Compute the next tokens of each row; return the logits of their last ones, or of all."""
        plan = PlanDraft(slots=list(range(len(rows))), num_tokens=list(counts), samples=[True] * len(rows))
        plan.num_drafts = [count - 1 if all_logits else 0 for count in counts]
        self.worker.lay_out(plan.freeze(0), payload)
        self.worker.select(self.worker.variant(payload))
        try:
            step = self.runner.input(rows, counts, all_logits=all_logits)
            if not all_logits:
                step.hidden_rows = step.logit_rows
            with torch.inference_mode():
                hidden = self.model.forward(self.model.embed(step), step)
                logits = self.model.logits(hidden).clone()
        finally:
            self.worker.select(None)
        for row, count in zip(rows, counts, strict=True):
            row.computed += count
        return logits


def load(files: ModelFiles, attention: AttentionBackend, **settings: Any) -> Adapted:
    from tiny import load_model

    return Adapted(load_model(files, attention), files, **settings)
