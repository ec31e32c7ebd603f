"""`LoraWorker`: the worker half. It reads adapters into host memory, loads them into blocks, and adds them to layers.

Steps have these variants: None (no row has an adapter, and the layers are as without this feature); "lora" (low-rank
additions to linear layers) and "experts" (to experts, too), by kernels where there are some; and "general" (also gains,
saved modules and embeddings; in torch, but not experts; never recorded). A native program computes gains in "lora" and
"experts"; in "ends" (never recorded), torch changes embeddings and logits around it.
"""

from __future__ import annotations

import logging
import platform
import weakref
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, cast

import msgspec
import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from octavo.core.errors import ConfigError, InvalidRequestError
from octavo.core.futures import mapped
from octavo.core.plan import StepPlan
from octavo.features import FeatureContext
from octavo.features.lora import kernels
from octavo.features.lora import payload as messages
from octavo.features.lora.delta import Replaced, TorchDelta, TorchEmbedding, Weights, by_rows
from octavo.features.lora.experts import TorchExperts
from octavo.features.lora.gains import BaseNorms
from octavo.features.lora.host import AT_ONCE, Host
from octavo.features.lora.layout import Geometry, Layout, Manifest, Piece, Target, largest, layout
from octavo.features.lora.native import NativeDelta, NativeExperts, native_dtype
from octavo.features.lora.payload import NAME, LoraStep, Reading, pages_of
from octavo.features.lora.reader import OpenAdapter, Reader
from octavo.features.lora.settings import LoraSettings
from octavo.features.lora.tables import NONE, RANKS, Batch, Tables
from octavo.features.lora.targets import Layer, Targets
from octavo.models.decoder import CausalLM
from octavo.models.load.arranged import arranged
from octavo.models.load.checkpoint import Checkpoint
from octavo.models.model import EncoderModel, Model
from octavo.models.native import NativeDecoder
from octavo.models.spec import DecoderSpec
from octavo.native.bindings import Dtype
from octavo.nn.delta import Delta, ExpertsDelta
from octavo.nn.embedding import Embedding
from octavo.nn.experts import ExpertLayer
from octavo.nn.linear import Projection
from octavo.nn.quant.experts import AddingExperts
from octavo.nn.step import StepInput
from octavo.worker.hooks import Reserved, Site, WorkerHook
from octavo.worker.worker import Worker

log = logging.getLogger(__name__)

LOW_RANK, EXPERTS, GENERAL, ENDS = "lora", "experts", "general", "ends"
_ROOMS = 8
_ROOM_BYTES = 16 << 20
"""Pinned memory through which adapters go to a GPU, in parts of a room each. It is reserved at the start, since
allocating it takes long and stops the GPU."""
_NAMED = 3
"""Layers that a line of the log names."""


class LoraWorker(WorkerHook):
    """The adapters of one rank.

    Args:
        max_adapters: adapters in blocks at once.
        max_rank: largest rank of one adapter.
        added_tokens: most tokens that one adds to the vocabulary.
    """

    name = NAME

    def __init__(self, max_adapters: int, max_rank: int, added_tokens: int = 0) -> None:
        self.added_tokens = added_tokens
        self._max_adapters, self._max_rank = max_adapters, max_rank
        self._host = Host()
        self._layouts: dict[int, Layout] = {}
        self._rows: NDArray[np.int32] = np.empty(0, dtype=np.int32)
        self._logits = self._rows
        self._deltas: dict[Hashable, list[tuple[Projection, Delta | None]]] = {}
        self._embeddings: list[TorchEmbedding] = []
        self._experts: list[tuple[ExpertLayer, Mapping[Hashable, ExpertsDelta]]] = []
        """Layers of experts, and their additions in some variants."""
        self._attached: weakref.ref[Model] | None = None
        self._selected: Hashable | None = None
        self._native: Dtype | None = None
        self._compiled = False
        self._unserved: frozenset[int] = frozenset()
        """Targets to which the kernels of a GPU can't add."""
        self._odd: set[int] = set()
        """Indices of adapters that change such targets."""
        self._scale = 1.0
        self._around = False
        """Torch changes the embeddings and logits of a native program."""
        self._head: Replaced | None = None

    # The model

    def prepare(self, worker: Worker, limits: tuple[int, int]) -> Reserved:
        if worker.settings.batch_invariant and worker.device.resident:
            raise ConfigError(
                "--batch-invariant: what adapters add on a GPU depends on the batch. Leave it out, or leave out "
                "--enable-lora, --lora-modules and --lora-dir."
            )
        return Reserved()

    def attach(self, model: Model | EncoderModel, site: Site) -> None:
        if not hasattr(model, "logits"):
            raise ConfigError("Encoders take no adapters. Leave out --enable-lora, --lora-modules and --lora-dir.")
        model = cast("Model", model)
        native = isinstance(model, NativeDecoder)
        layers = model.source if isinstance(model, NativeDecoder) else model
        if not isinstance(layers, nn.Module):
            raise ConfigError(
                "This model's layers are not Octavo's own, so adapters can't change them. Leave out --enable-lora."
            )
        if self.added_tokens:
            _check_extensible(layers, site)
        self._site = site
        self._spec = model.spec
        self._scale = getattr(layers, "embedding_multiplier", 1.0)
        divided = isinstance(layers, CausalLM) and not layers.is_whole
        whole = type(layers)(site.build, layers.spec) if divided else None
        self._targets = Targets.of(layers, whole)
        memory = site.blocks.memory
        if divided and not memory.shape[0]:
            raise ConfigError(
                "Adapters are kept in blocks of the KV cache, and a stage of the pipeline has no layer with one. Set "
                "--pipeline-layers so that each stage has such a layer, or leave out --enable-lora."
            )
        sizes = memory.shape[0], memory.shape[2], site.build.dtype.itemsize
        self._geometry = Geometry(*sizes, by_output=site.device.resident)
        self._unserved = self._without_kernels() if site.device.resident else frozenset()
        self._native = native_dtype(site.build.dtype, self._geometry, self._targets.targets) if native else None
        norms = BaseNorms(self._targets, partial(_arranged, site, model.spec))
        helpers = self._host.helpers if site.device.resident else None  # a CPU's cores compute
        self._reader = Reader(self._targets, self._geometry, site.build.dtype, norms.gains, helpers)
        self._norms = norms
        self._around = native and site.build.mesh.size == 1
        if (self._around or not native) and (self._attached is None or self._attached() is not model):
            self._attached = weakref.ref(model)
            self._wrap(model)

    def _without_kernels(self) -> frozenset[int]:
        """Return the layers to which the kernels of a GPU can't add."""
        targets = self._targets
        found = [
            i
            for i, (target, layer) in enumerate(zip(targets.targets, targets.layers, strict=True))
            if not (layer is None or isinstance(layer, Embedding) or self._serve(target, layer))
        ]
        if found:
            log.info(
                "steps with adapters of %s are computed in torch, without CUDA graphs: sizes are no multiples of 8, "
                "or rank %d is too large for tiles of %d bytes",
                ", ".join(targets.targets[i].name(0) for i in found[:_NAMED])
                + (", ..." if len(found) > _NAMED else ""),
                self._max_rank,
                self._geometry.tile_bytes,
            )
        return frozenset(found)

    def _serve(self, target: Target, layer: Layer) -> bool:
        """Return whether the kernels of a GPU can add to a layer. Both products of an expert have the same sizes."""
        if isinstance(layer, ExpertLayer) and not isinstance(layer.scheme, AddingExperts):
            return False
        return kernels.serves(target, self._geometry, self._max_rank)

    def _wrap(self, model: Model) -> None:
        """Have the model say which rows its late layers compute, and change its embeddings; and the logits of a native
        program."""
        embed, forward, logits, vocabulary = model.embed, model.forward, model.logits, model.spec.vocab_size

        def adapted_embed(step: StepInput) -> Tensor:
            if self._selected not in (GENERAL, ENDS):
                return embed(step)
            ids = step.input_ids
            if self.added_tokens:  # the table has no rows for those that adapters add
                ids = ids.clone()
                step.input_ids.clamp_(max=vocabulary - 1)
            x = self._embedded(embed(step), ids)
            if self.added_tokens:
                step.input_ids.copy_(ids)
            return x

        def adapted_forward(x: Tensor, step: StepInput) -> Tensor:
            self._batch.chosen = step.hidden_rows is not None
            return forward(x, step)

        model.embed, model.forward = adapted_embed, adapted_forward  # type: ignore[method-assign]
        source = model.source if isinstance(model, NativeDecoder) else model
        if source is not model or self.added_tokens:
            assert isinstance(source, CausalLM)
            model.logits = self._around_head(logits, source)  # type: ignore[method-assign, assignment]

    def _around_head(self, logits: Callable[[Tensor], Tensor], model: CausalLM) -> Callable[[Tensor], Tensor]:
        """Return `Model.logits` with what a native program can't compute, and with columns for added tokens."""

        def adapted_logits(hidden: Tensor) -> Tensor:
            head, replaces = self._head, self._selected == ENDS
            added = head.added if head is not None and self.added_tokens and self._selected in (GENERAL, ENDS) else 0
            if head is None or not (replaces or added):
                return logits(hidden)
            x = model.final(hidden)
            y = logits(hidden)
            if replaces:
                head.put(y, x, model.scaled)
            if added:
                y = F.pad(y, (0, added), value=float("-inf"))
                head.put_added(y, x, model.scaled)
            return y

        return adapted_logits

    def buffers(self, max_rows: int, max_tokens: int) -> Mapping[str, Tensor]:
        device, targets, geometry = self._site.device, self._targets.targets, self._geometry
        own = [targets[i] for i in sorted(self._targets.own)]
        most = min(largest(own, self._max_rank, geometry, self.added_tokens), self._site.blocks.memory.shape[1])
        self._tables = Tables(targets, geometry, self._max_adapters, most, device)
        most_groups = -(-self._max_rank // RANKS)
        self._batch = Batch(max(max_rows, max_tokens), self._max_adapters, device, most_groups)
        self._make_deltas()
        build = self._site.build
        if build.device.type == "cuda" and not self._compiled:
            from octavo.features.lora.ahead import compile_ahead  # needs triton, which machines without a GPU may lack

            experts = [(layer, added.get(EXPERTS)) for layer, added in self._experts]
            compile_ahead(self._deltas[LOW_RANK], experts, self._spec, build.dtype, build.device)
            self._compiled = True
        return {}

    def detach(self) -> None:
        self._norms.close()
        self._deltas.clear()
        self._embeddings.clear()
        self._experts.clear()
        self._head = None

    def _make_deltas(self) -> None:
        """Make the additions to each layer, for each variant."""
        weights = Weights(self._site.blocks, self._tables, self._site.build.dtype, self._site.device)
        self._deltas, self._embeddings, self._head = {LOW_RANK: [], GENERAL: []}, [], None
        experts: dict[ExpertLayer, dict[tuple[int, bool], tuple[int, Target]]] = {}
        for i, (target, layer) in enumerate(zip(self._targets.targets, self._targets.layers, strict=True)):
            if layer is None:
                continue
            if isinstance(layer, ExpertLayer):
                products = experts.setdefault(layer, {})
                products[target.expert, (target.expert, False) in products] = i, target
                continue
            if isinstance(layer, Embedding):
                self._embeddings.append(TorchEmbedding(i, target, weights, self._batch, self._scale))
                continue
            if target.head:
                self._head = Replaced(i, target, weights, self._batch, partial(_packed_bias, layer))
            if self._native is not None:
                self._deltas[LOW_RANK].append((layer, self._in_program(i, target)))
                continue
            cut = self._targets.cuts[i][0] if target.head else None
            plain = TorchDelta(i, target, layer, weights, self._batch, cut)
            self._deltas[GENERAL].append((layer, plain))
            if self._site.device.resident:
                self._deltas[LOW_RANK].append((layer, None if i in self._unserved else self._on_gpu(i, target)))
            else:
                self._deltas[LOW_RANK].append((layer, plain))

        self._experts = [(layer, self._of_experts(products, weights)) for layer, products in experts.items()]

    def _of_experts(
        self, products: Mapping[tuple[int, bool], tuple[int, Target]], weights: Weights
    ) -> Mapping[Hashable, ExpertsDelta]:
        """Return the additions to the experts of a layer."""
        if self._native is not None:
            own = {place: (self._in_program(*product), product[1]) for place, product in products.items()}
            native = NativeExperts(own, self._max_rank)
            return {EXPERTS: native, ENDS: native}
        first, target = products[0, False]
        if self._site.device.resident and first not in self._unserved:
            from octavo.features.lora.gpu_experts import KernelExperts  # needs triton, too

            both = target, products[0, True][1]
            added = KernelExperts(self._memory, self._tables, both, first, self._max_rank, self._batch)
            return {EXPERTS: added, GENERAL: added}
        plain = TorchExperts(products, weights, self._batch)
        return {GENERAL: plain} if self._site.device.resident else {EXPERTS: plain, GENERAL: plain}

    def _in_program(self, index: int, target: Target) -> NativeDelta:
        assert self._native is not None, "the model is a native program"
        return NativeDelta(self._site.blocks.memory, self._tables, target, index, self._batch, self._native)

    def _on_gpu(self, index: int, target: Target) -> Delta:
        """Return the kernels' addition to a layer."""
        from octavo.features.lora.gpu import low_rank_delta  # needs triton, which machines without a GPU may lack

        return by_rows(
            target,
            self._batch,
            lambda rows: low_rank_delta(self._memory, self._tables, target, index, self._max_rank, rows),
        )

    @property
    def _memory(self) -> Tensor:
        """The blocks in the adapters' dtype, [slices, blocks, elements of a slice]."""
        return self._site.blocks.memory.view(self._site.build.dtype)

    def _embedded(self, x: Tensor, ids: Tensor) -> Tensor:
        for embedding in self._embeddings:
            x = embedding.change(x, ids)
        return x

    # Each step

    def variant(self, payload: LoraStep | None) -> Hashable | None:
        if payload is None:
            return None
        if payload.general and self._changes_ends:
            return ENDS
        if self._native is None and (payload.general or self._lacks_kernels):
            return GENERAL
        return EXPERTS if payload.experts else LOW_RANK

    @property
    def _lacks_kernels(self) -> bool:
        """Whether adapters of the step change layers to which the kernels of a GPU can't add."""
        return not self._odd.isdisjoint(self._batch.tokens.groups)

    @property
    def _changes_ends(self) -> bool:
        """Whether adapters of the step change what torch computes around a native program."""
        if not self._around:
            return False
        targets, layouts = self._targets.targets, self._tables.layouts
        return any(
            targets[target].embedding or not span.rank
            for adapter in self._batch.tokens.groups
            for (target, _), span in layouts[adapter].spans.items()
        )

    def variants(self) -> Sequence[Hashable]:
        if self._native is None and not self._site.device.resident:
            return []
        return [LOW_RANK, EXPERTS] if any(EXPERTS in added for _, added in self._experts) else [LOW_RANK]

    def select(self, variant: Hashable | None) -> None:
        if variant == self._selected:
            return
        self._selected = variant
        for layer, delta in self._deltas[GENERAL if variant == GENERAL else LOW_RANK]:
            layer.delta = None if variant is None else delta
        for mixture, additions in self._experts:
            mixture.delta = additions.get(variant)

    def lay_out(self, plan: StepPlan, payload: LoraStep | None) -> None:
        if payload is None:
            return
        for entry in payload.entries:
            placed = self._layouts[entry.uid]
            self._tables.enter(entry.index, entry.blocks[: placed.num_blocks], placed)
            if any(target in self._unserved for target, _ in placed.spans):
                self._odd.add(entry.index)
            else:
                self._odd.discard(entry.index)
        if payload.rows is None:
            return
        self._rows = np.array(payload.rows, dtype=np.int32)
        adapters = np.repeat(self._rows, plan.num_tokens)
        if payload.skipped is not None:
            counts = np.array(plan.num_tokens)
            place = np.arange(len(adapters)) - np.repeat(counts.cumsum() - counts, counts)
            adapters[place < np.repeat(payload.skipped, counts)] = NONE
        self._batch.tokens.fill(adapters, self._tables.rank_groups)
        self._logits = np.repeat(self._rows, np.where(plan.samples, 1 + np.array(plan.num_drafts), 0))
        self._batch.logits.fill(self._logits, self._tables.rank_groups)

    def only_row(self, row: int | None, count: int = 0) -> None:
        if self._selected is None:
            return
        if row is None:
            self._batch.logits.fill(self._logits, self._tables.rank_groups)
        else:
            self._batch.logits.fill(np.full(count, self._rows[row], dtype=np.int32), self._tables.rank_groups)

    # Host memory

    def call(self, method: str, args: Mapping[str, Any]) -> Any | Future[Any]:
        """See `payload.py`."""
        if method == "targets":
            targets, form = self._targets, self._geometry
            sizes = form.slices, form.slice_bytes, form.element_size
            return msgspec.to_builtins(
                messages.RankTargets(
                    targets.targets,
                    tuple(sorted(targets.own)),
                    *sizes,
                    replaceable=self._native is None or self._around,
                    by_output=form.by_output,
                )
            )
        if method == "read":
            reading = msgspec.convert(args, Reading)
            self._check(reading)
            return mapped(self._host.read(self._reader, reading), partial(self._was_read, reading.uid))
        if method == "replaced":
            self._norms.weights_replaced()
            return {}
        if method == "drop":
            self._host.drop(args["uid"])
            return {}
        if method == "forget":
            self._host.drop(args["uid"])
            self._layouts.pop(args["uid"], None)
            return {}
        raise InvalidRequestError(f"The worker half has no method {method!r}.", param="method", value=method)

    def _check(self, reading: Reading) -> None:
        rank = reading.manifest.max_rank
        if rank > self._max_rank:
            raise InvalidRequestError(
                f"The ranks of these adapters add up to {rank}; this engine takes up to {self._max_rank}. Name fewer "
                f"adapters in one request, or start the engine with --max-lora-rank {rank}."
            )

    def _was_read(self, uid: int, adapter: OpenAdapter) -> dict[str, Any]:
        self._layouts[uid] = adapter.layout
        found: dict[str, Any] = msgspec.to_builtins(messages.ReadResult(platform.node(), adapter.version))
        return found

    def rooms(self, page_bytes: int) -> tuple[int, int]:
        if not self._site.device.resident:
            return 0, 0  # memory of the host is quick to allocate
        targets = self._targets.targets
        pieces = [
            Piece(i, part, self._max_rank)
            for i in sorted(self._targets.own)
            for part in range(len(targets[i].parts))
            if not targets[i].embedding
        ]
        largest = layout(targets, Manifest(tuple(pieces)), self._geometry).num_blocks
        pages = max(1, min(largest, _ROOM_BYTES // page_bytes))
        return pages, min(_ROOMS, -(-AT_ONCE * largest // pages))

    def load(self, names: Sequence[bytes], room: Callable[[], Tensor]) -> Future[Collection[int]]:
        return self._host.load(*pages_of(names), room, in_parts=self._site.device.resident)


def _arranged(site: Site, spec: object) -> Checkpoint:
    checkpoint = site.checkpoint()
    return arranged(checkpoint, spec) if isinstance(spec, DecoderSpec) else checkpoint


def _check_extensible(layers: nn.Module, site: Site) -> None:
    """Raise ConfigError where adapters can't add tokens to the vocabulary."""
    mesh, room = site.build.mesh, site.room
    reason = None
    if not isinstance(layers, CausalLM) or not layers.is_whole or mesh.size > 1 or mesh.context is not None:
        reason = "the model is divided over ranks"
    elif room is not None and room.max_drafts:
        reason = "drafters have the model's vocabulary, so turn speculative decoding off"
    if reason is not None:
        raise ConfigError(
            f"--lora-extra-vocab-size can't be used here: {reason}. Leave it out, and resize the base model instead "
            "(transformers: resize_token_embeddings)."
        )


def _packed_bias(layer: Projection) -> Tensor | None:
    return layer.matrix.bias


def build_worker(context: FeatureContext) -> LoraWorker | None:
    settings = context.settings_of(LoraSettings)
    if not settings.enabled:
        return None
    return LoraWorker(settings.most_on_device, settings.highest_rank, settings.lora_extra_vocab_size)
