"""`LoraWorker`: the worker half. It reads adapters into host memory, loads them into blocks, and adds them to layers.

Steps have three variants: None (no row has an adapter, and the layers are as without this feature), "lora" (low-rank
additions to linear layers, by kernels where there are some), and "general" (also gains, saved modules and embeddings;
in torch, never recorded).
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Collection, Hashable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, cast

import msgspec
import numpy as np
from torch import Tensor, nn

from octavo.core.errors import ConfigError, InvalidRequestError
from octavo.core.plan import StepPlan
from octavo.features import FeatureContext
from octavo.features.lora import payload as messages
from octavo.features.lora.delta import TorchDelta, TorchEmbedding, Weights
from octavo.features.lora.gains import BaseNorms
from octavo.features.lora.layout import Geometry, Layout, largest
from octavo.features.lora.payload import NAME, LoraStep, Reading, pages_of
from octavo.features.lora.reader import Reader
from octavo.features.lora.requests import MOST_PARTS
from octavo.features.lora.settings import LoraSettings
from octavo.features.lora.tables import Batch, Tables
from octavo.features.lora.targets import Targets
from octavo.models.model import EncoderModel, Model
from octavo.nn.delta import Delta
from octavo.nn.embedding import Embedding
from octavo.nn.linear import Projection
from octavo.nn.step import StepInput
from octavo.worker.hooks import Site, WorkerHook

LOW_RANK, GENERAL = "lora", "general"
_LAYOUTS_KEPT = 256
"""Layouts that are kept of adapters that are neither in host memory nor in the tables: some may be in blocks already,
and be used for the first time later."""


class LoraWorker(WorkerHook):
    """The adapters of one rank.

    Args:
        max_adapters: adapters in blocks at once.
        max_rank: largest rank of one adapter.
    """

    name = NAME

    def __init__(self, max_adapters: int, max_rank: int) -> None:
        self._max_adapters, self._max_rank = max_adapters, max_rank
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="octavo-adapters")
        self._pages: dict[int, Tensor] = {}
        self._layouts: OrderedDict[int, Layout] = OrderedDict()
        self._uids: dict[int, int] = {}
        self._rows: np.ndarray = np.empty(0, dtype=np.int32)
        self._attached: weakref.ref[Model] | None = None
        self._selected: Hashable | None = None

    # The model

    def attach(self, model: Model | EncoderModel, site: Site) -> None:
        if not hasattr(model, "logits"):
            raise ConfigError("Encoders take no adapters. Leave out --enable-lora, --lora-modules and --lora-dir.")
        model = cast("Model", model)
        if not isinstance(model, nn.Module):
            raise ConfigError("Adapters need a model that runs in torch here: set --attention-backend torch.")
        self._site = site
        self._targets = Targets.of(model)
        memory = site.blocks.memory
        self._geometry = Geometry(memory.shape[0], memory.shape[2], site.build.dtype.itemsize)
        norms = BaseNorms(self._targets, site.checkpoint)
        self._reader = Reader(self._targets, self._geometry, site.build.dtype, norms.gains)
        self._norms = norms
        if self._attached is None or self._attached() is not model:
            self._attached = weakref.ref(model)
            self._wrap(model)

    def _wrap(self, model: Model) -> None:
        """Have the model say which rows its late layers compute, and add to its embeddings."""
        embed, forward = model.embed, model.forward

        def adapted_embed(step: StepInput) -> Tensor:
            x = embed(step)
            return self._embedded(x, step.input_ids) if self._selected == GENERAL else x

        def adapted_forward(x: Tensor, step: StepInput) -> Tensor:
            self._batch.chosen = step.hidden_rows is not None
            return forward(x, step)

        model.embed, model.forward = adapted_embed, adapted_forward  # type: ignore[method-assign]

    def buffers(self, max_rows: int, max_tokens: int) -> Mapping[str, Tensor]:
        device, targets, geometry = self._site.device, self._targets.targets, self._geometry
        most = largest(targets, MOST_PARTS * self._max_rank, geometry)
        most = min(most, self._site.blocks.memory.shape[1])
        self._tables = Tables(targets, geometry, self._max_adapters, most, device)
        self._batch = Batch(max(max_rows, max_tokens), self._max_adapters, device)
        self._uids.clear()
        self._rows = np.empty(0, dtype=np.int32)
        self._make_deltas()
        return {}

    def _make_deltas(self) -> None:
        weights = Weights(self._site.blocks, self._tables, self._site.build.dtype, self._site.device)
        self._projections: list[tuple[Projection, Delta]] = []
        self._embeddings: list[TorchEmbedding] = []
        for i, (target, layer) in enumerate(zip(self._targets.targets, self._targets.layers, strict=True)):
            if isinstance(layer, Embedding):
                self._embeddings.append(TorchEmbedding(i, target, weights, self._batch))
            else:
                self._projections.append((layer, TorchDelta(i, target, layer, weights, self._batch)))

    def _embedded(self, x: Tensor, ids: Tensor) -> Tensor:
        for embedding in self._embeddings:
            x = embedding.change(x, ids)
        return x

    # Each step

    def variant(self, payload: LoraStep | None) -> Hashable | None:
        if payload is None:
            return None
        return GENERAL if payload.general else LOW_RANK

    def select(self, variant: Hashable | None) -> None:
        if variant == self._selected:
            return
        self._selected = variant
        for layer, delta in self._projections:
            layer.delta = None if variant is None else delta

    def lay_out(self, plan: StepPlan, payload: LoraStep | None) -> None:
        if payload is None:
            return
        for entry in payload.entries:
            self._uids[entry.index] = entry.uid
            self._tables.enter(entry.index, entry.blocks, self._layout(entry.uid))
        if payload.rows is None:
            return
        self._rows = np.array(payload.rows, dtype=np.int32)
        self._batch.tokens.fill(np.repeat(self._rows, plan.num_tokens))
        self._fill_logits(plan)

    def _fill_logits(self, plan: StepPlan) -> None:
        counts = np.where(plan.samples, 1 + np.array(plan.num_drafts), 0)
        self._batch.logits.fill(np.repeat(self._rows, counts))

    def _layout(self, uid: int) -> Layout:
        with self._lock:
            self._layouts.move_to_end(uid)
            return self._layouts[uid]

    # Host memory

    def call(self, method: str, args: Mapping[str, Any]) -> Any | Future[Any]:
        """See `payload.py`."""
        if method == "targets":
            return msgspec.to_builtins(messages.Targets(self._targets.targets, self._geometry.element_size))
        if method == "read":
            reading = msgspec.convert(args, Reading)
            return self._threads.submit(self._read, reading)
        if method == "drop":
            self._pages.pop(args["uid"], None)
            return {}
        raise InvalidRequestError(f"The worker half has no method {method!r}.", param="method", value=method)

    def _read(self, reading: Reading) -> dict[str, Any]:
        placed, pages = self._reader.read(reading)
        with self._lock:
            self._layouts[reading.uid], self._pages[reading.uid] = placed, pages
            needed = {*self._pages, *self._uids.values()}
            unneeded = [uid for uid in self._layouts if uid not in needed]
            for uid in unneeded[: len(unneeded) - _LAYOUTS_KEPT]:
                del self._layouts[uid]
        return {}

    def load(self, names: Sequence[bytes], pages: Tensor) -> Future[Collection[int]]:
        return self._threads.submit(self._load, names, pages)

    def _load(self, names: Sequence[bytes], pages: Tensor) -> Collection[int]:
        uid, numbers = pages_of(names)
        kept = self._pages.get(uid)
        if kept is None:
            return range(len(names))
        if numbers == list(range(len(kept))):
            pages.copy_(kept)
        else:
            for into, number in zip(pages, numbers, strict=True):
                into.copy_(kept[number])
        return ()


def build_worker(context: FeatureContext) -> LoraWorker | None:
    settings = context.settings_of(LoraSettings)
    return LoraWorker(settings.max_loras, settings.max_lora_rank) if settings.enabled else None
