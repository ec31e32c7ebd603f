"""Runs a model over a paged KV cache by hand: just enough of a worker to test models without one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from octavo.models.model import Model
from octavo.models.native import NativeDecoder
from octavo.nn.attention.native import native_step
from octavo.nn.state import StateCache
from octavo.nn.step import StepInput


@dataclass
class Row:
    """One sequence: its tokens so far, its KV blocks, and how many tokens are in them."""

    tokens: list[int]
    blocks: list[int]
    computed: int = 0


@dataclass
class PagedRunner:
    """Binds caches to a model and computes steps over rows whose blocks are scattered at random."""

    model: Model
    num_blocks: int
    block_size: int
    seed: int = 0
    dtype: torch.dtype = torch.float32
    free: list[int] = field(init=False)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.seed)
        self.free = torch.randperm(self.num_blocks, generator=generator).tolist()
        for layer in self.model.cached_layers:
            if isinstance(layer, StateCache):
                layer.cache = torch.full((self.num_blocks, layer.nbytes // 4), torch.nan)
                continue
            shape = layer.backend.cache_shape(layer.spec, self.num_blocks, self.block_size)
            # A NaN that reaches a logit was read from a slot that no token owns.
            layer.cache = torch.full(shape, torch.nan, dtype=self.dtype)

    def row(self, tokens: Sequence[int], capacity: int) -> Row:
        """A sequence with room for `capacity` tokens."""
        blocks = [self.free.pop() for _ in range(-(-capacity // self.block_size))]
        return Row(list(tokens), blocks)

    def step(self, rows: Sequence[Row], counts: Sequence[int], *, all_logits: bool = False) -> Tensor:
        """Compute the next `counts[i]` tokens of each row.

        Returns:
            [T, vocab] logits of every token computed, or [R, vocab] of each row's last one.
        """
        step = self.input(rows, counts, all_logits=all_logits)
        with torch.inference_mode():
            hidden = self.model.forward(self.model.embed(step), step)
            # A model may use the memory of its logits again.
            logits = self.model.logits(hidden[step.logit_rows]).clone()
        for row, count in zip(rows, counts, strict=True):
            row.computed += count
        return logits

    def input(self, rows: Sequence[Row], counts: Sequence[int], *, all_logits: bool = False) -> StepInput:
        """The step's input, prepared for the model's attention backend."""
        spans = [range(row.computed, row.computed + n) for row, n in zip(rows, counts, strict=True)]
        slots = [
            row.blocks[p // self.block_size] * self.block_size + p % self.block_size
            for row, span in zip(rows, spans, strict=True)
            for p in span
        ]
        starts = torch.tensor([0, *counts]).cumsum(0)
        width = max(len(row.blocks) for row in rows)
        step = StepInput(
            input_ids=torch.tensor([row.tokens[p] for row, span in zip(rows, spans, strict=True) for p in span]),
            positions=torch.tensor([p for span in spans for p in span]),
            query_start=starts.int(),
            seq_lens=torch.tensor([span.stop for span in spans], dtype=torch.int32),
            block_tables=torch.tensor([row.blocks + [0] * (width - len(row.blocks)) for row in rows]).int(),
            slot_mapping=torch.tensor(slots),
            logit_rows=torch.arange(int(starts[-1])) if all_logits else starts[1:] - 1,
            max_query_len=max(counts),
            max_seq_len=max(span.stop for span in spans),
        )
        attending = [layer for layer in self.model.cached_layers if not isinstance(layer, StateCache)]
        if isinstance(self.model, NativeDecoder):
            step.attn = native_step(step, self.block_size)
        elif attending:
            step.attn = attending[0].backend.prepare(step, self.block_size)
        return step

    def greedy(self, prompts: Sequence[Sequence[int]], max_new: Sequence[int], stop: set[int]) -> list[list[int]]:
        """Each prompt's greedy continuation, all in one ragged batch; a stop token ends it and is part of it."""
        rows = [self.row(p, len(p) + n) for p, n in zip(prompts, max_new, strict=True)]
        running = list(range(len(rows)))
        while running:
            batch = [rows[i] for i in running]
            logits = self.step(batch, [len(row.tokens) - row.computed for row in batch])
            for row, token in zip(batch, logits.argmax(-1).tolist(), strict=True):
                row.tokens.append(token)
            running = [
                i
                for i in running
                if rows[i].tokens[-1] not in stop and len(rows[i].tokens) - len(prompts[i]) < max_new[i]
            ]
        return [row.tokens[len(p) :] for row, p in zip(rows, prompts, strict=True)]
