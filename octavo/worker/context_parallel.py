"""`ContextParallel`: large steps, whose tokens are divided over ranks with the same weights.

A row of n tokens is cut into 2 N consecutive pieces for N ranks, and rank i gets the pieces i and 2 N - 1 - i: the
first and the last together attend to as much as any other two. To the layers, a piece is a chunk of a prompt like any
other. They exchange keys and values before they attend (`nn/token_exchange.py`), so every rank's KV cache holds every
sequence, and each computes steps that are not divided by itself, without any exchange.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

import msgspec
import numpy as np
import torch
from torch import Tensor

from octavo.config import ParallelConfig
from octavo.core.errors import ConfigError
from octavo.device.transfer import upload_parts
from octavo.models.decoder import CausalLM
from octavo.models.model import Model
from octavo.nn.step import StepInput
from octavo.nn.token_exchange import TokenExchange
from octavo.parallel.mesh import Mesh
from octavo.worker.micro_batches import has_only_attention, micro_batches_of
from octavo.worker.parts import Forward, Prepares


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive tokens [begin, end) of a row's tokens in a step."""

    row: int
    begin: int
    end: int


def pieces_of_ranks(lens: Sequence[int], ranks: int) -> list[list[Piece]]:
    """Return each rank's pieces of a step whose rows have these numbers of tokens, in the order of rows.

    The numbers of the ranks' tokens differ by no more than two, and rows of single tokens go to ranks in turn. A rank
    has tokens if the step has at least two for each.
    """
    count = 2 * ranks
    found: list[list[Piece]] = [[] for _ in range(ranks)]
    turn = 0
    for row, length in enumerate(lens):
        size, more = divmod(length, count)
        begin = 0
        for i in range(count):
            end = begin + size + ((i - turn) % count < more)
            own = found[min(i, count - 1 - i)]
            if own and own[-1].row == row and own[-1].end == begin:
                own[-1] = replace(own[-1], end=end)
            elif end > begin:
                own.append(Piece(row, begin, end))
            begin = end
        turn = (turn + more) % count
    return found


class ContextParallel:
    """`CausalLM.forward`, with the tokens of large steps divided over ranks.

    Args:
        mesh: the ranks.
        least: fewest tokens of a step that is divided.
    """

    def __init__(self, model: CausalLM, attention: Prepares, block_size: int, mesh: Mesh, least: int) -> None:
        self._model, self._attention, self._block_size, self._mesh = model, attention, block_size, mesh
        self._least = max(least, 2 * mesh.size)

    def takes(self, step: StepInput) -> bool:
        """Return whether a step has enough tokens to be divided, and no token attends to later ones."""
        return step.num_tokens >= self._least and step.ahead is None

    def forward(self, x: Tensor, step: StepInput) -> Tensor:
        """See `CausalLM.forward`. Every rank returns the states of all tokens, with the same bits."""
        if not self.takes(step):
            return self._model.forward(x, step)
        share = TokenShare.of(step, self._mesh)
        own = share.step(step)
        for one in (own, *own.others):
            assert one.exchange is not None
            for prepared in (one, one.exchange.everyone):
                prepared.attn = self._attention.prepare(prepared, self._block_size)
        hidden = self._model.forward(x.index_select(0, share.tokens), own)
        if (taps := self._model.taps) is not None:
            taps.states[: step.num_tokens] = share.gathered(taps.states[: own.num_tokens], None)
        return share.gathered(hidden, step.hidden_rows)


@dataclass(frozen=True, slots=True)
class TokenShare:
    """A rank's part of a step's tokens.

    Attributes:
        pieces: the rank's rows.
        counts: tokens of each rank.
        order: [all tokens] int32, the tokens in the order of ranks.
        places: [all tokens] int32, each token's place in that order.
        rows, tails: [R] int32, of each piece: its row, and the number of the row's tokens behind it.
        starts: [R + 1] int32, its first token among the rank's.
    """

    mesh: Mesh
    pieces: Sequence[Piece]
    counts: Sequence[int]
    order: Tensor
    places: Tensor
    rows: Tensor
    tails: Tensor
    starts: Tensor

    @classmethod
    def of(cls, step: StepInput, mesh: Mesh) -> TokenShare:
        """Divide a step, and return this rank's part. Read the rows' lengths from the device if the step lacks them."""
        lens = list(step.query_lens if step.query_lens is not None else step.query_start.diff().tolist())
        firsts = np.cumsum([0, *lens])
        found = pieces_of_ranks(lens, mesh.size)
        tokens = [[np.arange(firsts[one.row] + one.begin, firsts[one.row] + one.end) for one in own] for own in found]
        order = np.concatenate([part for parts in tokens for part in parts])
        places = np.empty_like(order)
        places[order] = np.arange(len(order))
        own = found[mesh.rank]
        rows, tails = [one.row for one in own], [lens[one.row] - one.end for one in own]
        starts = np.cumsum([0, *(one.end - one.begin for one in own)])
        sent = [np.asarray(part, dtype=np.int32) for part in (order, places, rows, tails, starts)]
        counts = [sum(map(len, parts)) for parts in tokens]
        return cls(mesh, own, counts, *upload_parts(sent, step.device))

    @property
    def first(self) -> int:
        """The place of the rank's first token in the order of ranks."""
        return sum(self.counts[: self.mesh.rank])

    @property
    def tokens(self) -> Tensor:
        """[T] int32: the rank's tokens."""
        return self.order[self.first : self.first + self.counts[self.mesh.rank]]

    def step(self, whole: StepInput) -> StepInput:
        """Return this rank's step, without `attn`. Its `hidden_rows` are as many as the whole step's: in place of
        tokens of other ranks, they name any of its own, whose states `gathered` leaves out."""
        own = self._of_group(whole)
        own.others = [self._of_group(one) for one in whole.others]
        return own

    def _of_group(self, whole: StepInput) -> StepInput:
        """Return the step of one cache group."""
        past = whole.past_lens
        everyone = replace(
            whole,
            positions=whole.positions.index_select(0, self.order),
            slot_mapping=whole.slot_mapping.index_select(0, self.order),
            hidden_rows=None,
            shared=None,
            others=(),
        )
        own = whole.part(
            self.tokens,
            self.rows,
            query_start=self.starts,
            query_lens=[one.end - one.begin for one in self.pieces],
            seq_lens=whole.seq_lens.index_select(0, self.rows) - self.tails,
            past_lens=None if past is None else [past[one.row] + one.begin for one in self.pieces],
        )
        own.hidden_rows = None if whole.hidden_rows is None else self._own(whole.hidden_rows)
        own.exchange = TokenExchange(self.mesh, self.counts, everyone)
        return own

    def _own(self, rows: Tensor) -> Tensor:
        """Return the places of tokens among the rank's own; any place for those of other ranks."""
        places = self.places.index_select(0, rows) - self.first
        return places.clamp_(0, self.counts[self.mesh.rank] - 1).long()

    def gathered(self, hidden: Tensor, rows: Tensor | None) -> Tensor:
        """Return the states of all tokens, or of `rows` [S], from those of the rank's step."""
        if rows is None:
            return self.mesh.gather_rows(hidden, self.counts).index_select(0, self.places)
        places = self.places.index_select(0, rows) - self.first
        elsewhere = (places < 0) | (places >= self.counts[self.mesh.rank])
        return self.mesh.all_reduce(hidden.masked_fill(elsewhere[:, None], 0))


def forward_of(
    model: Model, attention: Prepares, block_size: int, parallel: ParallelConfig, mesh: Mesh
) -> Forward | None:
    """Return what computes large steps in place of the model: over several ranks, or in two parts; None for the model
    itself.

    Raises:
        ConfigError: the tokens of this model can't be divided.
    """
    if mesh.context is None:
        return micro_batches_of(model, attention, block_size, parallel, mesh)
    check_contexts(model, parallel)
    assert isinstance(model, CausalLM)
    least = parallel.prefill_context_parallel_threshold
    return ContextParallel(model, attention, block_size, mesh.context, least).forward


def check_contexts(model: object, parallel: ParallelConfig) -> None:
    """Raise ConfigError if ranks are to divide the tokens of a model where they can't."""
    size = parallel.prefill_context_parallel_size
    if size > 1 and not has_only_attention(model):
        raise ConfigError(
            f"--prefill-context-parallel-size {size}: ranks can't divide the tokens of models with recurrent layers, "
            "whose states follow from one token to the next, or of models of transformers. Leave it out, or set "
            "--tensor-parallel-size, which divides heads and channels."
        )


def chosen_alike(choose: Callable[[], Collection[int]], context: Mesh | None, device: torch.device) -> Collection[int]:
    """Call `choose`, which chooses matrix products by measuring them, so that all ranks make the choices of the first.

    Steps that are not divided then have the same bits on all ranks, so they draw the same tokens.
    """
    from octavo.nn.ops import products  # needs triton, which machines without a GPU may lack

    owner = products.products()
    if context is None or owner is None:
        return choose()
    if context.rank == 0:
        chosen = choose()
        context.of_first(msgspec.json.encode(owner.known()), device)
        return chosen
    owner.adopt(msgspec.json.decode(context.of_first(b"{}", device), type=dict[str, str]))
    return choose()
