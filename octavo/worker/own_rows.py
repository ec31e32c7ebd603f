"""`OwnRows`: data-parallel attention. Each rank runs the layers on the rows of its own requests.

A request's KV blocks are on one rank, which the scheduler chooses. Plans go to all ranks, and all keep the slots of all
requests: each embeds all tokens, runs the layers on its own rows, in which only experts exchange rows (`RowExchange`),
and receives the hidden states of the others' rows. Head and sampling then see the whole step, as if the ranks divided
it. So ranks need not agree on anything: every plan says how many rows each of them has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.core.cache_groups import NO_BLOCK
from octavo.core.errors import ConfigError
from octavo.core.plan import StepPlan
from octavo.device.transfer import upload_parts
from octavo.models.decoder import CausalLM, DecoderLayer
from octavo.models.model import Model
from octavo.nn.norm import Norm
from octavo.nn.row_exchange import RowExchange
from octavo.nn.step import StepInput
from octavo.nn.stream import Stream
from octavo.worker.drafts import DraftRows
from octavo.worker.hooks import Hooks
from octavo.worker.parts import Prepares

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class _Share:
    """A rank's part of a step, and the order in which the ranks' parts make up the whole.

    Attributes:
        rows, tokens: indices of its rows and tokens in the step, ascending.
        lens: tokens of each of its rows.
        kept: indices in `tokens` of those whose hidden states are needed; None for all.
        counts, kept_counts: tokens of each rank, and those whose hidden states are needed.
        order: for each needed token of the step, its place among those of all ranks, in the order of the ranks.
    """

    rows: Ints
    tokens: Ints
    lens: Ints
    kept: Ints | None
    counts: list[int]
    kept_counts: list[int]
    order: Ints


class OwnRows:
    """`CausalLM.forward` on a rank's own rows.

    Attributes:
        mesh: the ranks.

    Args:
        num_blocks: KV blocks of each rank.
        num_slots: requests that run at once, on all ranks together.
    """

    def __init__(
        self,
        model: CausalLM,
        attention: Prepares,
        block_size: int,
        exchange: RowExchange,
        num_blocks: int,
        num_slots: int,
    ) -> None:
        self._model, self._attention, self._block_size = model, attention, block_size
        self._exchange, self._num_blocks, self.mesh = exchange, num_blocks, exchange.mesh
        self._ranks = np.full(num_slots, -1)
        """The rank of each slot's request; -1 if all ranks compute it, as in a warm-up."""
        self._plan: StepPlan | None = None

    def admit(self, plan: StepPlan) -> StepPlan:
        """Return the plan with this rank's numbers of KV blocks, and only its own copies. Call it for every plan.

        The scheduler numbers the blocks of all ranks, each rank's consecutively. Tables of other ranks' requests get
        numbers, too, which are never read.
        """
        for row in plan.new:
            self._ranks[row.slot] = row.rank
        if plan.new or plan.block_writes or plan.copies:
            own = self.mesh.rank
            plan = msgspec.structs.replace(
                plan,
                new=[msgspec.structs.replace(row, blocks=[self._local(one) for one in row.blocks]) for row in plan.new],
                block_writes=[(*entry, block % self._num_blocks) for *entry, block in plan.block_writes],
                copies=[
                    (source % self._num_blocks, into % self._num_blocks)
                    for source, into in plan.copies
                    if source // self._num_blocks == own
                ],
            )
        self._plan = plan
        return plan

    def _local(self, blocks: Sequence[int]) -> list[int]:
        return [block if block == NO_BLOCK else block % self._num_blocks for block in blocks]

    def ranks_of(self, slots: Sequence[int]) -> Ints:
        """Return the rank of each of these slots, [R]; -1 if all ranks compute all of them."""
        ranks: Ints = self._ranks[np.asarray(slots)]
        return ranks

    def forward(self, x: Tensor, step: StepInput) -> Tensor:
        """See `CausalLM.forward`; `step` is the plan last admitted, laid out, and x has its tokens."""
        assert self._plan is not None
        ranks = self.ranks_of(self._plan.slots)
        if ranks[0] < 0:
            return self._model.forward(x, step)
        share = _share(self._plan, ranks, self.mesh.rank, self.mesh.size, step.hidden_rows is None)
        sent = [share.rows, share.tokens, share.lens.cumsum(), share.order]
        if share.kept is not None:
            sent.append(share.kept)
        rows, tokens, ends, order, *kept = upload_parts([part.astype(np.int32) for part in sent], step.device)
        try:
            self._exchange.counts = share.counts
            if len(share.rows):
                part = self._part(step, share, rows, tokens, ends)
                own = self._run(x.index_select(0, tokens), part, share, kept[0] if kept else None)
            else:
                own = self._run_without_rows(x, share)
            self._exchange.counts = share.kept_counts
            return self._exchange.gathered(own).index_select(0, order)
        finally:
            self._exchange.counts = None

    def decode(self, x: Tensor, step: StepInput, own: Tensor, order: Tensor) -> Tensor:
        """Run the layers in a step of one token per row and equally many rows of each rank; see `CausalLM.forward`.

        Reads nothing on the host, so that graphs can record it.

        Args:
            own: [B] int32, this rank's rows; may include padding.
            order: [R] int32, for each row of the step its place among the B of each rank, in the order of the ranks.
        """
        part = self._rows(step, own, own, step.query_start[: len(own) + 1], [1] * len(own), None)
        hidden = self._model.forward(x.index_select(0, own), part)
        return self._exchange.gathered(hidden).index_select(0, order)

    def _part(self, step: StepInput, share: _Share, rows: Tensor, tokens: Tensor, ends: Tensor) -> StepInput:
        """Return this rank's rows as a step, with the attention backend's data."""
        start = torch.zeros(len(share.rows) + 1, dtype=torch.int32, device=step.device)
        start[1:] = ends
        pasts = None if step.past_lens is None else [step.past_lens[row] for row in share.rows.tolist()]
        return self._rows(step, rows, tokens, start, share.lens.tolist(), pasts)

    def _rows(
        self,
        step: StepInput,
        rows: Tensor,
        tokens: Tensor,
        start: Tensor,
        lens: Sequence[int],
        pasts: Sequence[int] | None,
    ) -> StepInput:
        """Return some rows of a step and their tokens as a step; see `StepInput.part`."""
        own, *others = (
            one.part(
                tokens,
                rows,
                query_start=start,
                query_lens=lens,
                seq_lens=one.seq_lens.index_select(0, rows),
                past_lens=pasts,
            )
            for one in (step, *step.others)
        )
        own.others = others
        for one in (own, *others):
            one.attn = self._attention.prepare(one, self._block_size)
        return own

    def _run(self, x: Tensor, part: StepInput, share: _Share, kept: Tensor | None) -> Tensor:
        """Run the layers on this rank's tokens x; return the hidden states of the `kept` ones."""
        model = self._model
        stream, layers = Stream(model.entering(x, part)), list(_layers(model))
        for layer in layers[:-1]:
            layer(stream, part)
        last = layers[-1]
        self._exchange.counts = share.kept_counts
        if kept is None or len(kept):
            last(stream, part, kept)
            return stream.total()
        if last.mixer is not None:  # the next steps read what it writes into the cache
            last.mixer(stream, last.input_norm, part)
        self._join(last)
        return x.new_empty(0, x.shape[1])

    def _run_without_rows(self, x: Tensor, share: _Share) -> Tensor:
        """Compute the rows of other ranks that chose this one's experts."""
        layers = list(_layers(self._model))
        for layer in layers:
            if layer is layers[-1]:
                self._exchange.counts = share.kept_counts
            self._join(layer)
        return x.new_empty(0, x.shape[1])

    def _join(self, layer: DecoderLayer) -> None:
        if layer.mlp is not None:
            norm: Norm = layer.post_norm
            layer.mlp.join(norm.dtype)


def _layers(model: CausalLM) -> Sequence[DecoderLayer]:
    return [layer for layer in model.layers if isinstance(layer, DecoderLayer)]


def _share(plan: StepPlan, ranks: Ints, own: int, size: int, every: bool) -> _Share:
    """Return a rank's share of a step.

    Args:
        ranks: the rank of each row.
        every: hidden states of all tokens are needed, not only of those that get logits.
    """
    counts = np.asarray(plan.num_tokens)
    rank_of_token = np.repeat(ranks, counts)
    if every:
        needed = np.arange(len(rank_of_token))
    elif any(plan.num_drafts):
        needed = DraftRows.of(plan).tokens
    else:
        needed = (counts.cumsum() - 1)[np.asarray(plan.samples)]
    tokens = np.flatnonzero(rank_of_token == own)
    rank_of_needed = rank_of_token[needed]
    rows = np.flatnonzero(ranks == own)
    return _Share(
        rows,
        tokens,
        counts[rows],
        None if every else np.searchsorted(tokens, needed[rank_of_needed == own]),
        np.bincount(rank_of_token, minlength=size).tolist(),
        np.bincount(rank_of_needed, minlength=size).tolist(),
        rank_of_needed.argsort(kind="stable").argsort(kind="stable"),
    )


def own_rows_of(
    model: Model,
    attention: Prepares,
    block_size: int,
    exchange: RowExchange | None,
    num_blocks: int,
    num_slots: int,
    hooks: Hooks,
) -> OwnRows | None:
    """Return what computes a rank's own rows; None if the ranks divide each layer.

    Args:
        hooks: of the features.

    Raises:
        ConfigError: the model or a feature does not work with divided requests.
    """
    if exchange is None:
        return None
    if not isinstance(model, CausalLM):
        raise ConfigError(f"{_FLAGS}: models of transformers divide no requests. {_REMEDY}")
    check_features(hooks)
    return OwnRows(model, attention, block_size, exchange, num_blocks, num_slots)


def check_features(hooks: Hooks) -> None:
    """Raise ConfigError if ranks can't divide the requests with these features."""
    for refused, what in (
        (hooks.varies, "adapters"),
        (hooks.preparing, "models and heads that draft"),
        (hooks.tiers, f"KV blocks outside of the device ({', '.join(hooks.tiers)})"),
    ):
        if refused:
            raise ConfigError(f"{_FLAGS}: {what} don't work with data-parallel attention. {_REMEDY}")


_FLAGS = "--data-parallel-size with --enable-expert-parallel"
_REMEDY = "Leave --enable-expert-parallel out for whole replicas, or use --tensor-parallel-size instead."
