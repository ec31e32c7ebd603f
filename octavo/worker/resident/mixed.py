"""`MixedGraphs`: steps that prompts take part in, recorded for some numbers of tokens and replayed.

Launching such a step piece by piece takes the host about as long as the GPU takes for a thousand tokens. A graph does
not know which rows its tokens will belong to: that is sent to a fixed place, in one transfer, and what is left of each
part of it names an empty row. Attention has as many programs as such a step could need; some find nothing to do.
"""

from __future__ import annotations

import bisect
import logging
import time
from collections.abc import Collection
from dataclasses import dataclass, fields

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


@dataclass(frozen=True, slots=True)
class _Layout:
    """What a batch of up to T tokens is made of: int32 tensors, parts of one.

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

    slots: Tensor
    query_start: Tensor
    row_of_token: Tensor
    logit_rows: Tensor
    sample_slots: Tensor
    single: Tensor
    tiles: Tensor

    @classmethod
    def of(cls, packed: Tensor, tokens: int, tiles: int) -> _Layout:
        """Views of the beginning of `packed`."""
        sizes = _sizes(tokens, tiles)
        room = [_aligned(size) for size in sizes]
        return cls(*(part[:size] for part, size in zip(packed[: sum(room)].split(room), sizes, strict=True)))


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
        self._layouts: dict[int, _Layout] = {}
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
        room = sum(map(_aligned, _sizes(largest, self._tiles[largest])))
        self._packed = torch.empty(room, dtype=torch.int32, device=device)
        self._layouts = {count: _Layout.of(self._packed, count, self._tiles[count]) for count in self._counts}
        self._buffers = empty_step(largest + 2, largest, device)
        self._send(None, largest)
        self._hidden = self._computed(largest).clone()

    def _send(self, plan: StepPlan | None, size: int) -> None:
        """What the plan's batch is made of; None stands for one that is all padding."""
        host = np.zeros(sum(map(_aligned, _sizes(size, self._tiles[size]))), dtype=np.int32)
        into = _Layout.of(torch.from_numpy(host), size, self._tiles[size])
        parts = {field.name: getattr(into, field.name).numpy() for field in fields(_Layout)}
        counts = np.asarray(plan.num_tokens if plan is not None else [], dtype=np.int32)
        rows, tokens = len(counts), int(counts.sum())
        for name, padding in (("slots", self._slots.num_slots), ("sample_slots", self._slots.num_slots)):
            parts[name].fill(padding)
        parts["query_start"].fill(size)
        parts["row_of_token"].fill(rows)
        parts["single"].fill(size + 1)
        parts["tiles"][::2] = size + 1
        start = parts["query_start"]
        start[0] = 0
        np.cumsum(counts, out=start[1 : rows + 1])
        parts["row_of_token"][:tokens] = np.repeat(np.arange(rows, dtype=np.int32), counts)
        if plan is not None:
            samples = np.asarray(plan.samples, dtype=bool)
            sampled = int(samples.sum())
            parts["slots"][:rows] = plan.slots
            parts["logit_rows"][:sampled] = start[1 : rows + 1][samples] - 1
            parts["sample_slots"][:sampled] = parts["slots"][:rows][samples]
            tiles, single = self._attention.cut(counts, self._slots.past_lens(plan), self._slots.device)
            parts["tiles"][: len(tiles)] = tiles
            parts["single"][: len(single)] = single
        self._packed[: len(host)].copy_(upload(host, self._slots.device))

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


def _sizes(tokens: int, tiles: int) -> list[int]:
    """Of the parts of a layout."""
    return [tokens + 2, tokens + 3, tokens, tokens, tokens, tokens, 2 * tiles]


def _aligned(size: int) -> int:
    """Each part begins on 16 bytes."""
    return -(-size // 4) * 4
