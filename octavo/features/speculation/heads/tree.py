"""`TreeDrafter`: a head drafts a tree (EAGLE, https://arxiv.org/abs/2401.15077, section 3.1): after each draft that
others follow, its most likely tokens.

The drafts of one depth are computed in one step. Their keys and values are scratch: the head computes accepted drafts
again beside the target's states.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from octavo.core.draft_tree import DraftTree
from octavo.device.transfer import Graph, GraphRecorder, Link
from octavo.features.speculation.heads.model import HeadModel
from octavo.nn.build import AnyBackend
from octavo.nn.step import StepInput

_RECORDED = (1, 2, 4, 8)
"""Numbers of rows with a recording. Larger steps hardly gain from trees."""


@dataclass(frozen=True, slots=True)
class _Level:
    """n drafts of one depth that others follow. Tensors are int64 on the device.

    Attributes:
        depth: their depth; 0 for the last known token.
        first: place of the first one in the head's cache, after the known tokens.
        drafts: [n], their indices in the tree.
        parents: [n], places of the drafts before them in the level before.
        widest: most tokens that follow one of them.
        followers: [m], indices in the tree of the drafts that follow.
        choices: [m], which of the n x `widest` most likely tokens each of these is.
        unseen: [n] int32, see `StepInput`.
    """

    depth: int
    first: int
    drafts: Tensor
    parents: Tensor
    widest: int
    followers: Tensor
    choices: Tensor
    unseen: Tensor

    @property
    def size(self) -> int:
        return len(self.drafts)


def _levels(tree: DraftTree, device: torch.device) -> list[_Level]:
    """Return the levels of a tree; the first one is the last known token, as draft -1."""

    def sent(values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    followers = {i: [j for j, parent in enumerate(tree.parents) if parent == i] for i in range(-1, len(tree))}
    inner = sorted((i for i in range(len(tree)) if followers[i]), key=lambda i: (tree.depths[i], i))
    place = {draft: i for i, draft in enumerate(inner)}
    unseen = DraftTree(tuple(place.get(tree.parents[i], -1) for i in inner)).unseen if inner else np.zeros(0, np.int32)
    levels, before = [], [-1]
    for depth, drafts in itertools.groupby([-1, *inner], key=lambda i: int(tree.depths[i]) if i >= 0 else 0):
        own = list(drafts)
        first = place.get(own[0], 0)
        widest = max(len(followers[draft]) for draft in own)
        levels.append(
            _Level(
                depth=depth,
                first=first,
                drafts=sent(own),
                parents=sent([before.index(tree.parents[draft]) for draft in own if draft >= 0]),
                widest=widest,
                followers=sent([one for draft in own for one in followers[draft]]),
                choices=sent([i * widest + j for i, draft in enumerate(own) for j in range(len(followers[draft]))]),
                unseen=torch.from_numpy(unseen[first : first + len(own)]).to(device),
            )
        )
        before = own
    return levels


class TreeDrafter:
    """Drafts for a head's slots, without reading from the device.

    Drafts that others follow are stored in the head's cache one after the other, by depth. On a GPU, steps of few rows
    are recorded.

    Attributes:
        most_at_once: most drafts of a row in a step.
    """

    def __init__(
        self, tree: DraftTree, head: HeadModel, attention: AnyBackend, block_size: int, max_model_len: int
    ) -> None:
        self._size, self._head, self._attention = len(tree), head, attention
        self._page, self._longest = block_size, max_model_len
        self._levels = _levels(tree, head.given.device)
        self.most_at_once = max(level.size for level in self._levels)
        self._graphs: dict[int, Graph] = {}

    def record(self, recorder: GraphRecorder, link: Link, max_rows: int, blocks: int) -> None:
        """Record drafting for up to 8 rows, or as many as a step has room for.

        Args:
            max_rows: most rows of a step.
            blocks: entries of a block table.
        """
        room = len(self._head.given) // self.most_at_once
        sizes = [size for size in _RECORDED if size < 2 * max_rows and size <= room]
        if not sizes:
            return  # nor does a step have room for a tree
        device, most = self._head.given.device, sizes[-1]
        self._hidden = torch.zeros(most, self._head.given.shape[1], dtype=self._head.given.dtype, device=device)
        self._tables = torch.zeros(most, blocks, dtype=torch.int32, device=device)
        self._known = torch.full((most,), -1, device=device)
        self._found = torch.zeros(most, self._size, dtype=torch.int64, device=device)
        recorder.start()
        for size in reversed(sizes):
            self._draft_recorded(size)  # compiles and loads kernels
            link.synchronize()
            self._graphs[size] = recorder.record(partial(self._draft_recorded, size))

    @torch.inference_mode()
    def _draft_recorded(self, size: int) -> None:
        self._found[:size].copy_(self._draft(self._hidden[:size], self._tables[:size], self._known[:size]))

    def draft(self, hidden: Tensor, tables: Tensor, known: Tensor) -> Tensor:
        """Return the most likely tokens in the shape of the tree, [D, N] int64; the next call may overwrite them.

        Args:
            hidden: [D, hidden_size], the head's outputs for the last known tokens.
            tables: [D, B] int32, block tables of the head's slots, with room for the drafts.
            known: [D] int64, tokens that the head has computed; -1 for a row of padding.
        """
        rows = len(known)
        size = min((size for size in self._graphs if size >= rows), default=0)
        if not size:
            return self._draft(hidden, tables, known)
        for buffer, values in ((self._hidden, hidden), (self._tables, tables), (self._known, known)):
            buffer[:rows].copy_(values)
        self._known[rows:size].fill_(-1)
        self._graphs[size].replay()
        return self._found[:rows]

    def _draft(self, hidden: Tensor, tables: Tensor, known: Tensor) -> Tensor:
        rows = len(known)
        found = known.new_zeros(rows, self._size)
        hidden = hidden[:, None]
        for level in self._levels:
            if level.depth:
                step = self._step(level, found.index_select(1, level.drafts), tables, known)
                given = self._head.given[: rows * level.size]
                given.copy_(hidden.index_select(1, level.parents).flatten(0, 1))
                hidden = self._head(self._head.embed(step), step).unflatten(0, (rows, level.size))
            likely = self._head.likeliest(hidden.flatten(0, 1), level.widest)
            found.index_copy_(1, level.followers, likely.view(rows, -1).index_select(1, level.choices))
        return found

    def _step(self, level: _Level, tokens: Tensor, tables: Tensor, known: Tensor) -> StepInput:
        """Return the step that computes the drafts [D, n] of a level."""
        rows, count = tokens.shape
        device, live = tokens.device, known >= 0
        places = known[:, None] + level.first + torch.arange(count, device=device)
        places = places.clamp_(min=0)
        cells = tables.gather(1, places // self._page).long() * self._page + places % self._page
        step = StepInput(
            input_ids=tokens.flatten(),
            positions=(known + level.depth - 1).clamp_(min=0).repeat_interleave(count),
            query_start=torch.arange(0, (rows + 1) * count, count, dtype=torch.int32, device=device),
            seq_lens=torch.where(live, known + level.first + count, 0).int(),
            block_tables=tables,
            slot_mapping=torch.where(live[:, None], cells, -1).flatten(),
            logit_rows=torch.arange(rows * count, device=device),
            max_query_len=count,
            max_seq_len=self._longest,
            query_lens=[count] * rows,
            unseen=level.unseen.repeat(rows),
        )
        step.attn = self._attention.prepare(step, self._page)
        return step
