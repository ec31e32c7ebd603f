"""`GraphReplay`: record steps once per shape and replay them, so that a step costs the host two launches.

There are two graphs per batch size: layout and forward pass, which leaves hidden states in a fixed buffer; then output
head, sampling and appending of the tokens. Batches that need more than plain sampling replay only the first. All inputs
are read from the slots, so a decoding step with unchanged rows uploads nothing.

Some batch sizes have a second forward pass, which reads common prefixes of contexts once. Steps with prompts have a
forward pass per number of tokens, and where a feature drafts, so have small steps whose rows have few tokens each:
launched operation by operation, they take the host about as long as a thousand tokens take the GPU. The graphs of
decoding sample their tokens.

A stage of a pipeline that does not sample has the forward passes only, which leave the hidden states of all tokens.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from octavo.core.plan import StepPlan
from octavo.core.spans import Spans, Watched
from octavo.device.transfer import Graph, GraphRecorder, Link
from octavo.models.decoder import CausalLM
from octavo.models.model import Model
from octavo.nn.attention.recordable import Recordable
from octavo.nn.step import StepInput
from octavo.sampling.allowed import Allowed
from octavo.sampling.drawn import Drawn
from octavo.worker.compute import compute
from octavo.worker.hooks import ORDINARY, Hooks, Variant
from octavo.worker.own_rows import OwnRows
from octavo.worker.parts import Forward
from octavo.worker.resident.batches import (
    Drafted,
    Ragged,
    Singles,
    draft_counts,
    least,
    most_tokens,
    token_counts,
)
from octavo.worker.resident.own_singles import OwnSingles
from octavo.worker.resident.row_counts import sizes
from octavo.worker.resident.sampling import SamplingGraphs
from octavo.worker.resident.sharing import Groups
from octavo.worker.resident.slots import DeviceBatch, DeviceSlots
from octavo.worker.step import Step

log = logging.getLogger(__name__)

_WORTH = 32 << 20
"""Least bytes per layer saved for which reading common prefixes once pays: the cost of two more launches, at 4 TB/s."""
_WORTH_OF_PADDING = 2 << 20
"""Additional bytes for each row of padding, measured with a model of 8 billion parameters."""


class ReplayKey(NamedTuple):
    """Key of a recorded forward pass.

    Attributes:
        rows: of the batch, padding included.
        queries: most tokens of each row; 0 for any number.
        tokens: of the batch, padding included.
        shares: common prefixes of contexts are read once.
        variant: the hooks' variant of the model.
    """

    rows: int
    queries: int
    tokens: int
    shares: bool = False
    variant: Variant = ORDINARY


class _UploadedBatch(NamedTuple):
    """The batch of single tokens that was sent last, and the key of its graph."""

    version: int
    slots: Sequence[int]
    variant: Variant
    key: ReplayKey

    def is_for(self, version: int, plan: StepPlan, variant: Variant) -> bool:
        same = self.slots is plan.slots or self.slots == plan.slots
        return same and version == self.version and variant == self.variant


class _Taken(NamedTuple):
    """Result of `takes` for `forward`: the recorded size, the variant, and the batches; None if all rows have a single
    token."""

    size: int
    variant: Variant
    batches: Ragged | None


class GraphReplay:
    """A `Replay` of graphs on fixed buffers. Takes no step before `capture`."""

    draws = False

    def __init__(
        self,
        model: Model,
        attention: Recordable,
        slots: DeviceSlots,
        sampling: SamplingGraphs | None,
        link: Link,
        hooks: Hooks,
        own_rows: OwnRows | None = None,
    ) -> None:
        """
        Args:
            sampling: records the second graphs; None if a later stage of the pipeline samples.
            own_rows: as in `Runner`.
        """
        self.count = 0
        self._model = model
        self._attention = attention
        self._slots = slots
        self._sampling = sampling
        self._link = link
        self._hooks = hooks
        self._own_rows = own_rows
        self._forwards: dict[ReplayKey, Graph] = {}
        self._loaded: _UploadedBatch | None = None
        self._taken = _Taken(0, ORDINARY, None)

    @torch.inference_mode()
    def capture(
        self,
        recorder: GraphRecorder,
        max_rows: int,
        max_tokens: int,
        loaded: Collection[int] = (),
        *,
        max_drafts: int = 0,
        shares: bool = True,
    ) -> None:
        """Record decoding and the shorter steps with prompts, in all variants.

        The largest size is recorded first, so that the others reuse the memory of its pool. Kernels must be compiled
        and loaded before they are recorded, so each size is run first, except those in `loaded` that are no powers of
        two: in a few layers, which launch the same kernels as all.

        Args:
            max_rows, max_tokens: limits of a step.
            loaded: sizes whose matrix products, the only kernels that depend on the exact size, are loaded.
            max_drafts: most drafts of a row.
            shares: also record forward passes that read common prefixes once.
        """
        if self._own_rows is not None:
            loaded = ()  # experts have other numbers of rows than the layers around them
        began = time.perf_counter()
        recorder.start()
        self._hooks.select(ORDINARY)
        self._reserve_singles(max_rows, max_tokens, shares=shares)
        variants = self._hooks.variants()
        with no_collection():
            for variant in variants:
                self._hooks.select(variant)
                self._capture_singles(recorder, variant, loaded)
        seconds, taken = time.perf_counter() - began, recorder.taken() / (1 << 30)
        log.info("captured decoding at %d batch sizes in %.1f s and %.2f GiB", len(self._singles.sizes), seconds, taken)
        began = time.perf_counter()
        self._hooks.select(ORDINARY)
        self._reserve_ragged(max_rows, max_tokens, max_drafts, varied=len(variants) > 1)
        with no_collection():
            for variant in variants:
                self._hooks.select(variant)
                for batches in (self._ragged, self._drafted):
                    self._capture_ragged(recorder, variant, loaded, batches)
        seconds = time.perf_counter() - began
        log.info("captured steps of %d numbers of tokens in %.1f s", len(self._ragged.counts), seconds)
        self._hooks.select(ORDINARY)

    def _reserve_singles(self, max_rows: int, max_tokens: int, *, shares: bool) -> None:
        layers = [layer for layer in self._model.attention_layers if layer.spec.shares_prefixes]
        parts = self._slots, self._attention
        if self._own_rows is None:
            self._singles = Singles(*parts, sizes(max_rows), shares=shares and bool(layers))
        else:
            self._singles = OwnSingles(*parts, self._own_rows, max_rows)
        self._block_bytes = layers[0].cache[0].nbytes if layers else 0
        largest = self._singles.sizes[-1]
        self._hidden = self._single(largest).clone()
        if self._sampling is not None:
            self._sampling.bind(self._singles.rows, self._hidden)

    def _reserve_ragged(self, max_rows: int, max_tokens: int, max_drafts: int, *, varied: bool) -> None:
        every = self._sampling is None
        if self._own_rows is not None:
            max_tokens = 0  # only steps of single tokens have equal numbers of tokens on all ranks
        counts = token_counts(max_tokens, varied=varied)
        self._ragged = Ragged(self._slots, self._attention, counts, every_token=every)
        most = min(max_drafts, self._attention.most_few - 1)
        counts = draft_counts(max_tokens, most, max_rows) if most > 0 else []
        self._drafted = Drafted(self._slots, self._attention, counts, every_token=every)
        batches = [one for one in (self._ragged, self._drafted) if one.counts]
        for one in batches:
            one.send(None, one.counts[-1])
        hidden = [self._mixed(one.counts[-1], one) for one in batches]
        self._ragged_hidden = max(hidden, key=len).clone() if hidden else torch.empty(0)

    def _capture_singles(self, recorder: GraphRecorder, variant: Variant, loaded: Collection[int]) -> None:
        every = self._singles.sizes
        first = [size for size in every if not _is_loaded(size, every, loaded)]
        with self._in_few_layers():
            for size in reversed(first):
                self._forward(size)
                if self._sampling is not None:
                    self._sampling.compute(size)
                if size in self._singles.sharing:
                    self._forward(size, shares=True)
        for size in reversed(every):
            shares = size in self._singles.sharing
            self._link.synchronize()
            self._forwards[ReplayKey(size, 1, size, False, variant)] = recorder.record(partial(self._forward, size))
            if self._sampling is not None:
                self._sampling.record(recorder, size, variant)
            if shares:
                graph = recorder.record(partial(self._forward, size, shares=True))
                self._forwards[ReplayKey(size, 1, size, True, variant)] = graph

    def _capture_ragged(
        self, recorder: GraphRecorder, variant: Variant, loaded: Collection[int], batches: Ragged
    ) -> None:
        every = [size for size in batches.counts if size <= most_tokens(varied=variant != ORDINARY)]
        first = [size for size in every if not _is_loaded(size, every, loaded)]
        with self._in_few_layers():
            for size in reversed(first):
                batches.send(None, size)
                self._forward_mixed(size, batches)
        for size in reversed(every):
            self._link.synchronize()
            graph = recorder.record(partial(self._forward_mixed, size, batches))
            self._forwards[self._key(size, variant, batches)] = graph

    def _in_few_layers(self) -> AbstractContextManager[None]:
        return self._model.in_few_layers() if isinstance(self._model, CausalLM) else nullcontext()

    def _key(self, size: int, variant: Variant, batches: Ragged) -> ReplayKey:
        queries = self._attention.most_few if batches is self._drafted else 0
        return ReplayKey(size + 2, queries, size, False, variant)

    # What is recorded

    def _forward(self, size: int, *, shares: bool = False) -> None:
        self._hidden[:size].copy_(self._single(size, shares=shares))

    def _single(self, size: int, *, shares: bool = False) -> Tensor:
        """Compute a decoding step; return its hidden states [size, hidden_size]."""
        singles = self._singles
        step = singles.step(size, shares=shares)
        prepare = partial(self._attention.prepare, block_size=self._page)
        return self._computed(singles.batch(size), step, prepare, singles.forward)

    def _forward_mixed(self, size: int, batches: Ragged) -> None:
        self._ragged_hidden[:size].copy_(self._mixed(size, batches))

    def _mixed(self, size: int, batches: Ragged) -> Tensor:
        """Compute a step with prompts or drafts; return hidden states [size, hidden_size]: of the tokens that get
        logits, or of all if a later stage samples."""
        return self._computed(batches.batch(size), batches.step(size), partial(batches.foreseen, size))

    def _computed(
        self,
        batch: DeviceBatch,
        step: StepInput,
        prepare: Callable[[StepInput], object],
        forward: Forward | None = None,
    ) -> Tensor:
        self._slots.write_step(batch, step)
        for one in (step, *step.others):
            one.attn = prepare(one)
        hidden = compute(self._model, step, self._hooks, forward=forward)
        self._slots.count(batch)
        return hidden

    @property
    def _page(self) -> int:
        return self._slots.block_size

    # Replay

    def takes(self, plan: StepPlan, variant: Variant) -> bool:
        """Return whether a graph of the plan's size was recorded for the variant."""
        if not self._has(variant):
            return False
        decodes = max(plan.num_tokens) == 1 and all(plan.samples)
        if decodes:
            batches, size = None, self._singles.bucket(plan.slots)
        else:
            batches = self._drafted if self._drafted.bucket(plan) else self._ragged
            size = batches.bucket(plan)
        self._taken = _Taken(size, variant, batches)
        return size > 0 and (batches is None or self._key(size, variant, batches) in self._forwards)

    def _has(self, variant: Variant) -> bool:
        if not self._forwards:
            return False
        size = self._singles.sizes[0]
        return ReplayKey(size, 1, size, False, variant) in self._forwards

    @torch.inference_mode()
    def forward(self, step: Step, allowed: Allowed | None) -> None:
        """Replay the step's forward pass, which leaves hidden states in the input buffer of the sampling graphs, or of
        all tokens if a later stage samples. The next replay overwrites them."""
        (size, variant, batches), plan = self._taken, step.plan
        if batches is None:
            key = self._load(plan, size, variant)
            self._forwards[key].replay()
            count = len(plan.slots)
            step.hidden, step.rows = self._hidden[:count], self._singles.rows[:count]
            step.recorded = key.rows, variant
        else:
            batches.send(plan, size)
            self._forwards[self._key(size, variant, batches)].replay()
            if self._sampling is None:
                step.hidden = self._ragged_hidden[: plan.total_tokens]
            else:
                self._adopt(step, size, variant, batches)
        self._slots.mirror(plan)
        self.count += 1

    def _load(self, plan: StepPlan, size: int, variant: Variant) -> ReplayKey:
        """Send the batch, unless the last one had the same rows; return the key of its graph."""
        version = self._slots.tables.version
        if self._loaded is not None and self._loaded.is_for(version, plan, variant):
            return self._loaded.key
        slots, key = plan.slots, ReplayKey(size, 1, size, False, variant)
        larger = next((each for each in self._singles.sharing if each >= size), 0)
        if larger and (groups := self._worth_sharing(slots, larger - size)) is not None:
            key = ReplayKey(larger, 1, larger, True, variant)
            self._singles.send_groups(groups, larger)
        self._singles.send(slots, key.rows)
        self._loaded = _UploadedBatch(version, slots, variant, key)
        return key

    def _worth_sharing(self, slots: Sequence[int], padding: int) -> Groups | None:
        """Return the groups of contexts with common prefixes, if reading these once pays for `padding` more rows."""
        groups = self._singles.groups(slots)
        worth = _WORTH + padding * _WORTH_OF_PADDING
        return groups if groups is not None and groups.saved * self._block_bytes >= worth else None

    def _adopt(self, step: Step, size: int, variant: Variant, batches: Ragged) -> None:
        """Copy a mixed batch's hidden states and slots to the input buffers of the sampling graphs, which know no
        drafts.

        `size` is a batch size of decoding, or larger than all of them.
        """
        drafts, count = any(step.plan.num_drafts), len(step.plan.logit_slots)
        hidden, slots = self._ragged_hidden, batches.sample_slots(size)
        batch = least(self._singles.sizes, count)
        if not batch or not count or drafts:
            step.hidden, step.rows = hidden[:count], slots[:count]
            return
        self._loaded = None
        self._hidden[:count].copy_(hidden[:count])
        self._singles.rows[:batch].copy_(slots[:batch])
        step.hidden, step.rows = self._hidden[:count], self._singles.rows[:count]
        step.recorded = batch, variant

    @torch.inference_mode()
    def sample(self, step: Step, allowed: Allowed | None) -> Drawn | None:
        """Sample the step just replayed; None if a row needs more than plain sampling, or no graph was recorded."""
        assert self._sampling is not None, "a later stage samples"
        if step.recorded is None or step.rows is None or not self._slots.plain(step.plan):
            return None
        size, variant = step.recorded
        return self._sampling.replay(size, variant, len(step.rows), allowed)

    def retract(self, step: Step) -> Tensor:
        raise AssertionError("the forward pass samples no tokens")

    def watch(self, spans: Spans) -> None:
        spans.watch(Watched(self, "forward", "replay layers"))
        spans.watch(Watched(self, "sample", "replay sampling"))

    def close(self) -> None:
        log.debug("replayed %d steps", self.count)
        self._forwards.clear()
        if self._sampling is not None:
            self._sampling.close()


def _is_loaded(size: int, every: Sequence[int], loaded: Collection[int]) -> bool:
    """Return whether a size can be recorded without running it first."""
    return size in loaded and size & (size - 1) != 0 and size != every[-1]


@contextmanager
def no_collection() -> Iterator[None]:
    """Exempt all objects from the garbage collection in each capture; on a large heap it takes longer than the
    capture."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def recordable(model: Model) -> bool:
    """Return whether steps of the model can be recorded in graphs; log it if not."""
    found: bool = getattr(model, "recordable", True)
    if not found:
        why = "the model copies data between host and device"
        log.warning("steps are not recorded in graphs, which makes decoding slower: %s", why)
    return found
