"""`TreeDrafter`: a head drafts a tree (EAGLE, https://arxiv.org/abs/2401.15077, section 3.1): after each draft that
others follow, its most likely tokens.

The drafts of one depth are computed in one step. Their keys and values are scratch: the head computes accepted drafts
again beside the target's states.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from octavo.core.draft_tree import DraftTree
from octavo.features.speculation.heads.model import HeadModel
from octavo.nn.build import AnyBackend
from octavo.nn.step import StepInput


class TreeDrafter:
    """Drafts for a head's slots, without reading from the device.

    Drafts that others follow are stored in the head's cache one after the other, by depth.
    """

    def __init__(self, tree: DraftTree, head: HeadModel, attention: AnyBackend, block_size: int) -> None:
        self._tree, self._head, self._attention, self._size = tree, head, attention, block_size
        self._followers = [[j for j, parent in enumerate(tree.parents) if parent == i] for i in range(-1, len(tree))]
        """Of the last known token, and of each draft."""
        inner = sorted((i for i in range(len(tree)) if self._followers[1 + i]), key=lambda i: (tree.depths[i], i))
        self._levels = [list(level) for _, level in itertools.groupby(inner, key=lambda i: int(tree.depths[i]))]
        place = {draft: i for i, draft in enumerate(inner)}
        self._unseen = DraftTree(tuple(place.get(tree.parents[i], -1) for i in inner)).unseen

    def draft(self, hidden: Tensor, tables: Tensor, known: Tensor, most_known: int) -> Tensor:
        """Return the most likely tokens in the shape of the tree, [D, N] int64.

        Args:
            hidden: [D, hidden_size], the head's outputs for the last known tokens.
            tables: [D, B] int32, block tables of the head's slots, with room for the drafts.
            known: [D] int64, tokens that the head has computed.
            most_known: upper bound of these, on the host.
        """
        found = known.new_zeros(len(known), len(self._tree))
        self._choose(found, [-1], hidden)
        hidden, above, first = hidden[:, None], {-1: 0}, 0
        for depth, level in enumerate(self._levels, start=1):
            parents = [above[self._tree.parents[draft]] for draft in level]
            step = self._step(found[:, level], tables, known, (depth, first), most_known)
            count = len(known) * len(level)
            self._head.given[:count].copy_(hidden[:, parents].flatten(0, 1))
            hidden = self._head(self._head.embed(step), step)
            self._choose(found, level, hidden)
            hidden = hidden.unflatten(0, (len(known), len(level)))
            above, first = {draft: i for i, draft in enumerate(level)}, first + len(level)
        return found

    def _choose(self, found: Tensor, drafts: list[int], hidden: Tensor) -> None:
        """Fill in the tokens after each of these drafts, whose outputs are [D n, hidden_size]."""
        widest = max(len(self._followers[1 + draft]) for draft in drafts)
        likely = self._head.logits(hidden).topk(widest, dim=1).indices.unflatten(0, (len(found), len(drafts)))
        for i, draft in enumerate(drafts):
            followers = self._followers[1 + draft]
            found[:, followers] = likely[:, i, : len(followers)]

    def _step(
        self, tokens: Tensor, tables: Tensor, known: Tensor, level: tuple[int, int], most_known: int
    ) -> StepInput:
        """Return the step that computes the drafts [D, n] of a level: its depth, and its first draft's place."""
        rows, count = tokens.shape
        device, (depth, first) = tokens.device, level
        places = known[:, None] + first + torch.arange(count, device=device)
        cells = tables.gather(1, places // self._size).long() * self._size + places % self._size
        unseen = torch.from_numpy(self._unseen[first : first + count]).to(device, non_blocking=True)
        step = StepInput(
            input_ids=tokens.flatten(),
            positions=(known + depth - 1).repeat_interleave(count),
            query_start=torch.arange(0, (rows + 1) * count, count, dtype=torch.int32, device=device),
            seq_lens=(known + first + count).int(),
            block_tables=tables,
            slot_mapping=cells.flatten(),
            logit_rows=torch.arange(rows * count, device=device),
            max_query_len=count,
            max_seq_len=most_known + first + count,
            query_lens=[count] * rows,
            unseen=unseen.repeat(rows),
        )
        step.attn = self._attention.prepare(step, self._size)
        return step
