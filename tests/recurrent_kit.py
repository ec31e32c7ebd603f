"""Rows of a step with states in blocks, to run operations of recurrent layers on."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from octavo.native.bindings import StepArgs
from octavo.native.builder import ProgramBuilder
from octavo.native.program import Pool, Program
from octavo.native.recurrent import States


@dataclass
class Rows:
    """Rows of a step: each one's tokens, tokens before them, and block.

    Attributes:
        num_blocks: of the cache; rows use some of them.
    """

    lengths: Sequence[int]
    past: Sequence[int]
    blocks: Sequence[int]
    num_blocks: int

    @classmethod
    def drawn(cls, rng: random.Random) -> Rows:
        """Some rows, of no token, one or several, in any order, that begin a sequence or continue one."""
        lengths = [0, 1, 1, rng.randint(2, 9), rng.randint(20, 40), rng.choice([0, 1, 3])]
        rng.shuffle(lengths)
        past = [rng.choice([0, rng.randint(1, 50)]) for _ in lengths]
        past[0], past[1] = 0, 7
        return cls(lengths, past, rng.sample(range(9), len(lengths)), 9)

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    def spans(self) -> list[tuple[int, int]]:
        """Each row's first token and the one after its last."""
        starts = [sum(self.lengths[:i]) for i in range(len(self.lengths) + 1)]
        return list(pairwise(starts))

    def only(self, row: int, first: int, end: int) -> Rows:
        """A step with tokens [first, end) of a row."""
        return Rows([end - first], [self.past[row] + first], [self.blocks[row]], self.num_blocks)

    def states(self, generator: torch.Generator, *shape: int) -> Tensor:
        """States of all blocks, [blocks, *shape]; those of rows that begin are NaN."""
        states = torch.randn(self.num_blocks, *shape, generator=generator)
        for past, block in zip(self.past, self.blocks, strict=True):
            if not past:
                states[block] = torch.nan
        return states

    def before(self, row: int, states: Tensor) -> Tensor:
        """A row's state before the step, float64."""
        state = states[self.blocks[row]].double()
        return state if self.past[row] else torch.zeros_like(state)

    def run(self, pool: Pool, b: ProgramBuilder, *external: Tensor) -> None:
        """Run all operations of the builder, whose external buffers these are."""
        starts = torch.tensor([0, *self.lengths]).cumsum(0).int()
        lens = torch.tensor([n + past for n, past in zip(self.lengths, self.past, strict=True)]).int()
        tables = torch.tensor([[block, -1] for block in self.blocks]).int()
        step = StepArgs(
            query_start=starts.data_ptr(),
            seq_lens=lens.data_ptr(),
            block_tables=tables.data_ptr(),
            table_stride=2,
            tokens=self.tokens,
            rows=len(self.lengths),
            block_size=16,
        )
        step.external[: len(external)] = tuple(one.data_ptr() for one in external)
        Program(pool, b).run(0, len(b.ops), step)


def in_program(states: Tensor) -> States:
    return States(states.data_ptr(), states.stride(0))
