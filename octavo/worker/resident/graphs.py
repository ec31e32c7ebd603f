"""`DecodeGraphs`: decoding recorded once for each batch size and replayed, so that a step costs the host two launches.

Two graphs a size: layout and forward pass, which leaves the hidden states in a fixed buffer; then head, draw and the
taking in of the tokens. Batches that need more than the plain draw replay the first alone. A batch is padded up to the
next size with rows of length 0. All inputs are read from the slots, so a step whose rows did not change sends nothing.

Some sizes have a second forward pass, which reads once what contexts have in common.
"""

from __future__ import annotations

import bisect
import gc
import logging
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from octavo.device.transfer import upload
from octavo.models.model import Model
from octavo.nn.attention.base import FusedBackend
from octavo.nn.step import SharedContexts, StepInput
from octavo.sampling.resident import ResidentSampler
from octavo.worker.resident.rows import Batch, ResidentSlots, empty_step
from octavo.worker.resident.sharing import Groups, shared_room

log = logging.getLogger(__name__)

MAX_ROWS = 1024
_SHARING = (8, 16, 32, 64, 128, 192, 256, 384, 512)
"""The sizes, as far as they are recorded, with a pass for contexts that begin alike."""
_WORTH = 32 << 20
"""From how many bytes a layer on it pays to read contexts once: what two more launches take, at 4 TB/s."""
_WORTH_OF_PADDING = 2 << 20
"""And how many more for a row of padding, of a model of 8 billion parameters."""


@dataclass(slots=True)
class _Size:
    forward: torch.cuda.CUDAGraph
    sample: torch.cuda.CUDAGraph
    sharing: torch.cuda.CUDAGraph | None = None


def sizes(max_rows: int) -> list[int]:
    """Batch sizes to record, ascending; the largest is `max_rows` or 1,024."""
    top = min(max_rows, MAX_ROWS)
    wanted = [1, 2, 4, 8, *range(16, 257, 16), *range(288, 513, 32), *range(576, MAX_ROWS + 1, 64)]
    return sorted({size for size in wanted if size < top} | {top})


class DecodeGraphs:
    """Static buffers for the largest size, of which each graph uses the beginning.

    Attributes:
        pool: the memory of what is computed on the way, once something is recorded.
    """

    def __init__(
        self,
        model: Model,
        attention: FusedBackend,
        slots: ResidentSlots,
        sampler: ResidentSampler,
        block_size: int,
    ) -> None:
        self._model = model
        self._attention = attention
        self._slots = slots
        self._sampler = sampler
        self._block_size = block_size
        self._graphs: dict[int, _Size] = {}
        self._sizes: list[int] = []
        self._sharing: list[int] = []
        self._loaded: tuple[int, list[int]] = (0, [])
        self._replay: tuple[int, torch.cuda.CUDAGraph] | None = None
        self.pool: Any = None

    def capture(self, max_rows: int, loaded: Collection[int] = (), *, shares: bool = True) -> None:
        """Record all sizes, the largest first, so that the others find their memory in its pool; and with `shares` what
        reads once what contexts have in common.

        What is recorded must have been compiled and loaded before. Of the sizes in `loaded` only the matrix products
        depend on the very size, and these are; so only the powers of two among them are run first.
        """
        began = time.perf_counter()
        torch.cuda.empty_cache()
        free = torch.cuda.mem_get_info(self._slots.device)[0]
        self._reserve(max_rows, shares)
        self.pool = torch.cuda.graph_pool_handle()
        with no_collection():
            for size in reversed(self._sizes):
                if size not in loaded or size & (size - 1) == 0 or size == self._sizes[-1]:
                    self._forward(size)
                    self._sample(size)
                    if size in self._sharing:
                        self._forward(size, self._shared_contexts(size))
                torch.cuda.synchronize()
                graphs = _Size(torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph())
                with torch.cuda.graph(graphs.forward, pool=self.pool):
                    self._forward(size)
                with torch.cuda.graph(graphs.sample, pool=self.pool):
                    self._sample(size)
                if size in self._sharing:
                    graphs.sharing = torch.cuda.CUDAGraph()
                    with torch.cuda.graph(graphs.sharing, pool=self.pool):
                        self._forward(size, self._shared_contexts(size))
                self._graphs[size] = graphs
        taken = (free - torch.cuda.mem_get_info(self._slots.device)[0]) / (1 << 30)
        seconds = time.perf_counter() - began
        log.info("captured decoding at %d batch sizes in %.1f s and %.2f GiB", len(self._sizes), seconds, taken)

    def _reserve(self, max_rows: int, shares: bool) -> None:
        """The buffers of the largest size."""
        device = self._slots.device
        self._sizes = sizes(max_rows)
        largest = self._sizes[-1]
        self._rows = torch.full((largest,), self._slots.num_slots, dtype=torch.int32, device=device)
        self._starts = torch.arange(largest + 1, dtype=torch.int32, device=device)
        self._buffers = empty_step(largest, largest, device)
        self._sampled = torch.empty(largest, dtype=torch.int32, device=device)
        layers = [layer for layer in self._model.attention_layers if layer.spec.window is None]
        shares = shares and bool(layers) and self._most_sharing > 1
        self._sharing = [size for size in _SHARING if size in self._sizes and shares]
        room = shared_room(self._sharing[-1], self._most_sharing) if self._sharing else 0
        self._shared = torch.zeros(room, dtype=torch.int32, device=device)
        self._block_bytes = layers[0].cache[0].nbytes if layers else 0
        self._hidden = self._computed(largest).clone()

    def bucket(self, rows: int) -> int:
        """The recorded size for so many rows; 0 if there is none."""
        index = bisect.bisect_left(self._sizes, rows)
        return self._sizes[index] if index < len(self._sizes) else 0

    def forward(self, slots: Sequence[int]) -> tuple[Tensor, Tensor, int] | None:
        """One step of decoding for these slots, with one token each; None if so many are not recorded.

        Returns:
            hidden states [R, H] and slots [R], and the size for `sample`.
        """
        wanted = (self._slots.tables.version, list(slots))
        if self._replay is None or wanted != self._loaded:
            self._replay = self._load(slots)
            self._loaded = wanted
        if self._replay is None:
            return None
        size, graph = self._replay
        graph.replay()
        return self._hidden[: len(slots)], self._rows[: len(slots)], size

    def _load(self, slots: Sequence[int]) -> tuple[int, torch.cuda.CUDAGraph] | None:
        """Send the batch, and say by which size and graph it is computed."""
        size = self.bucket(len(slots))
        if not size:
            return None
        graph = self._graphs[size].forward
        larger = next((each for each in self._sharing if each >= size), 0)
        if larger and (groups := self._worth_sharing(slots, larger - size)) is not None:
            size = larger
            sharing = self._graphs[size].sharing
            assert sharing is not None
            graph = sharing
            shared = groups.padded(size, self._most_sharing, self._block_size)
            self._shared[: len(shared)].copy_(upload(shared, self._slots.device))
        rows = np.full(size, self._slots.num_slots, dtype=np.int32)
        rows[: len(slots)] = slots
        self._rows[:size].copy_(upload(rows, self._slots.device))
        return size, graph

    def _worth_sharing(self, slots: Sequence[int], padding: int) -> Groups | None:
        """What these contexts have in common, if reading it once pays for so many more rows of padding."""
        groups = self._slots.shared(slots, self._block_size, *self._attention.sharing())
        worth = _WORTH + padding * _WORTH_OF_PADDING
        return groups if groups is not None and groups.saved * self._block_bytes >= worth else None

    def adopt(self, hidden: Tensor, slots: Tensor, count: int) -> tuple[Tensor, Tensor, int]:
        """Have a batch drawn for that was computed elsewhere: the first `count` hidden states [T, H].

        `slots` [T] are theirs, and behind them stands for padding. T is a recorded size, or larger than all are.

        Returns:
            hidden states [S, H] and slots [S], and the size for `sample`; 0 if so many are not recorded.
        """
        size = self.bucket(count)
        if not size or not count:
            return hidden[:count], slots[:count], 0
        self._replay = None
        self._hidden[:count].copy_(hidden[:count])
        self._rows[:size].copy_(slots[:size])
        return self._hidden[:count], self._rows[:count], size

    def sample(self, size: int) -> Tensor:
        """The plain draw of the batch just computed: [size] int32, overwritten by the next step."""
        self._graphs[size].sample.replay()
        return self._sampled[:size]

    @property
    def _most_sharing(self) -> int:
        return self._attention.sharing()[0]

    def _shared_contexts(self, size: int) -> SharedContexts:
        return SharedContexts.of(self._shared[: shared_room(size, self._most_sharing)], size)

    def _forward(self, size: int, shared: SharedContexts | None = None) -> None:
        self._hidden[:size].copy_(self._computed(size, shared))

    def _computed(self, size: int, shared: SharedContexts | None = None) -> Tensor:
        """One step of decoding: its hidden states [size, H]."""
        slots = self._slots
        batch = self._batch(size)
        step = StepInput(
            **{name: buffer[:size] for name, buffer in self._buffers.items()},
            query_start=batch.query_start,
            block_tables=slots.block_tables,
            table_rows=batch.slots,
            logit_rows=self._starts[:size],
            max_query_len=1,
            max_seq_len=slots.max_model_len,
            shared=shared,
        )
        slots.lay_out(batch, step, self._block_size)
        step.attn = self._attention.prepare(step, self._block_size)
        hidden = self._model.forward(self._model.embed(step), step)
        slots.advance(batch)
        return hidden

    def _sample(self, size: int) -> None:
        logits = self._model.logits(self._hidden[:size])
        rows = self._rows[:size]
        self._sampled[:size].copy_(self._sampler.draw(logits, rows))
        self._slots.append(rows, self._sampled[:size])

    def _batch(self, size: int) -> Batch:
        return Batch(self._rows[:size], self._starts[: size + 1], self._starts[:size])


@contextmanager
def no_collection() -> Iterator[None]:
    """Each capture collects garbage, which takes longer than the capture where the heap is large."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
