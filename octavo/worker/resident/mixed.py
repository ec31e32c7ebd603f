"""`MixedGraphs`: steps that prompts take part in, recorded for some numbers of tokens and replayed.

Launching such a step piece by piece takes the host about as long as the GPU takes for a thousand tokens. A graph does
not know which rows its tokens will belong to: that is sent to a fixed place, in one transfer, and what is left of each
part of it names an empty row. Attention has as many programs as such a step could need; some find nothing to do.
"""

from __future__ import annotations

import bisect
import itertools
import logging
import time
from collections.abc import Collection
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from octavo.core.plan import StepPlan
from octavo.device.transfer import upload
from octavo.models.model import Model
from octavo.nn.attention.base import FusedBackend
from octavo.nn.step import StepInput
from octavo.worker.resident.graphs import DecodeGraphs, no_collection
from octavo.worker.resident.rows import Batch, ResidentSlots, empty_step

log = logging.getLogger(__name__)

MAX_TOKENS = 1024
"""From here on, launching takes no longer than computing."""
_MAX_PROMPTS = 16
"""Prompts in a recorded step. A step of more is launched piece by piece."""


def token_counts(max_tokens: int) -> list[int]:
    """Numbers of tokens to record, ascending, none above `max_tokens`; the smaller ones are batch sizes of decoding."""
    wanted = [16, 32, *range(64, 513, 64), *range(640, MAX_TOKENS + 1, 128)]
    return [count for count in wanted if count <= max_tokens]


A = TypeVar("A", Tensor, np.ndarray)


@dataclass(frozen=True, slots=True)
class _Layout(Generic[A]):
    """What a batch of up to T tokens is made of: parts of one int32 array, on the host or the device.

    Rows are those of the batch, then one of padding tokens, and further ones up to the last, which is always empty.

    Attributes:
        slots: [T + 2], of the rows.
        query_start: [T + 3].
        row_of_token: [T].
        logit_rows: [T], tokens that get logits.
        sample_slots: [T], the slots of these.
        single: [T], rows with one query.
        tiles: [2 n], tiles of the other rows.
    """

    slots: A
    query_start: A
    row_of_token: A
    logit_rows: A
    sample_slots: A
    single: A
    tiles: A

    @classmethod
    def of(cls, packed: A, tokens: int, tiles: int) -> _Layout[A]:
        """Views of the beginning of `packed`, whose parts begin on 16 bytes each."""
        ends = _ends(tokens, tiles)
        return cls(*(packed[begin:end] for begin, end in ends))

    @staticmethod
    def room(tokens: int, tiles: int) -> int:
        """The length of `packed`."""
        return -(-_ends(tokens, tiles)[-1][1] // 4) * 4


def _ends(tokens: int, tiles: int) -> list[tuple[int, int]]:
    """Where the parts begin and end."""
    sizes = (tokens + 2, tokens + 3, tokens, tokens, tokens, tokens, 2 * tiles)
    starts = itertools.accumulate((-(-size // 4) * 4 for size in sizes), initial=0)
    return [(start, start + size) for start, size in zip(starts, sizes, strict=False)]


class MixedGraphs:
    """One graph for each number of tokens: layout and forward pass, to the hidden states of the tokens with logits.

    Beside the graphs of decoding, whose memory it shares; the plain draw of its tokens is theirs to replay.
    """

    def __init__(
        self, model: Model, attention: FusedBackend, slots: ResidentSlots, block_size: int, decoding: DecodeGraphs
    ) -> None:
        self._model = model
        self._attention = attention
        self._slots = slots
        self._block_size = block_size
        self._decoding = decoding
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._layouts: dict[int, _Layout[Tensor]] = {}
        self._counts: list[int] = []

    def capture(self, max_tokens: int, loaded: Collection[int] = ()) -> None:
        """Record all numbers of tokens up to `max_tokens`. `loaded` as in `DecodeGraphs.capture`."""
        began = time.perf_counter()
        self._reserve(max_tokens)
        with no_collection():
            for count in reversed(self._counts):
                if count not in loaded or count & (count - 1) == 0 or count == self._counts[-1]:
                    self._send(None, count)
                    self._forward(count)
                torch.cuda.synchronize()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, pool=self._decoding.pool):
                    self._forward(count)
                self._graphs[count] = graph
        log.info("captured steps of %d numbers of tokens in %.1f s", len(self._counts), time.perf_counter() - began)

    def bucket(self, plan: StepPlan) -> int:
        """The recorded number of tokens for the plan; 0 if there is none."""
        index = bisect.bisect_left(self._counts, plan.total_tokens)
        prompts = sum(count > 1 for count in plan.num_tokens)
        return self._counts[index] if index < len(self._counts) and prompts <= _MAX_PROMPTS else 0

    def forward(self, plan: StepPlan, size: int) -> tuple[Tensor, Tensor, int]:
        """Replays the plan's step; `size` as `bucket` says.

        Returns:
            hidden states [S, H] and slots [S] of the tokens that get logits, where the graphs of decoding expect them,
            and by which batch size those draw; 0 if by none.
        """
        layout = self._layouts[size]
        self._send(plan, size)
        self._graphs[size].replay()
        return self._decoding.adopt(self._hidden[:size], layout.sample_slots, sum(plan.samples))

    def _reserve(self, max_tokens: int) -> None:
        """The places that all graphs share, each using their beginnings."""
        self._counts = token_counts(max_tokens)
        if not self._counts:
            return
        device, largest = self._slots.device, self._counts[-1]
        self._tiles = {count: self._attention.most_tiles(count, _MAX_PROMPTS, device) for count in self._counts}
        room = _Layout.room(largest, self._tiles[largest])
        self._packed = torch.empty(room, dtype=torch.int32, device=device)
        self._layouts = {count: _Layout.of(self._packed, count, self._tiles[count]) for count in self._counts}
        self._buffers = empty_step(largest + 2, largest, device)
        self._send(None, largest)
        self._hidden = self._computed(largest).clone()

    def _send(self, plan: StepPlan | None, size: int) -> None:
        """What the plan's batch is made of; None stands for one that is all padding."""
        host = np.zeros(_Layout.room(size, self._tiles[size]), dtype=np.int32)
        into = _Layout.of(host, size, self._tiles[size])
        into.slots.fill(self._slots.num_slots)
        into.query_start[1:].fill(size)
        into.sample_slots.fill(self._slots.num_slots)
        into.single.fill(size + 1)
        into.tiles[::2] = size + 1
        if plan is not None:
            self._fill(into, plan)
        self._packed[: len(host)].copy_(upload(host, self._slots.device))

    def _fill(self, into: _Layout[np.ndarray], plan: StepPlan) -> None:
        counts = np.asarray(plan.num_tokens, dtype=np.int32)
        rows, tokens = len(counts), plan.total_tokens
        into.slots[:rows] = plan.slots
        np.cumsum(counts, out=into.query_start[1 : rows + 1])
        into.row_of_token[:tokens] = np.repeat(np.arange(rows, dtype=np.int32), counts)
        into.row_of_token[tokens:] = rows
        sampled = np.flatnonzero(plan.samples)
        into.logit_rows[: len(sampled)] = into.query_start[1 + sampled] - 1
        into.sample_slots[: len(sampled)] = into.slots[sampled]
        tiles, single = self._attention.cut(counts, self._slots.past_lens(plan), self._slots.device)
        into.tiles[: len(tiles)] = tiles
        into.single[: len(single)] = single

    def _forward(self, size: int) -> None:
        self._hidden[:size].copy_(self._computed(size))

    def _computed(self, size: int) -> Tensor:
        """One step: hidden states [T, H], in the order of `logit_rows`."""
        slots, layout = self._slots, self._layouts[size]
        batch = Batch(layout.slots, layout.query_start, layout.row_of_token)
        buffers = {name: buffer[:size] for name, buffer in self._buffers.items()}
        step = StepInput(
            **buffers | {"seq_lens": self._buffers["seq_lens"][: size + 2]},
            query_start=batch.query_start,
            block_tables=slots.block_tables,
            table_rows=batch.slots,
            logit_rows=layout.logit_rows,
            hidden_rows=layout.logit_rows,
            max_query_len=size,
            max_seq_len=slots.max_model_len,
        )
        slots.lay_out(batch, step, self._block_size)
        step.attn = self._attention.foreseen(layout.tiles, layout.single, size)
        hidden = self._model.forward(self._model.embed(step), step)
        slots.advance(batch)
        return hidden
