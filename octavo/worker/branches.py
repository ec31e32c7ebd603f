"""`Branches`: a tree of drafts in a worker: verified in one step, the tokens of the accepted path moved together."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from octavo.core.cache_groups import GroupKind
from octavo.core.draft_tree import DraftTree
from octavo.core.errors import ConfigError
from octavo.nn.attention.base import BranchingBackend
from octavo.nn.attention.layer import PagedAttention
from octavo.nn.build import AnyBackend
from octavo.nn.cached import CachedLayer
from octavo.sampling.verify import verify_branches
from octavo.worker.blocks import Blocks

if TYPE_CHECKING:
    from octavo.worker.worker import Worker


class Branches:
    """The drafts of a row are a tree if there are more than `tree.chain`.

    A tree's drafts are stored in the slot and in the cache one after the other, after the known tokens. Once they are
    verified, keys and values of the accepted path are moved to the places of their positions.

    Attributes:
        tree: the shape.
    """

    def __init__(
        self, tree: DraftTree, block_size: int, device: torch.device, move: Callable[[Tensor, Tensor], None]
    ) -> None:
        """
        Args:
            move: copies cells [n] int64 to others [n], in all layers; see `BranchingBackend.move`.
        """
        self.tree = tree
        self._size = block_size
        self._move = move
        self._parents = torch.tensor(tree.parents, device=device)
        self._depths = torch.from_numpy(tree.depths).to(device)
        self._precedes = torch.from_numpy(tree.precedes.astype(np.float32)).to(device)

    def verify(self, drawn: Tensor, drafts: Tensor, counts: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
        """Verify trees and chains; see `verify_branches`."""
        return verify_branches(drawn, drafts, counts, starts, self._parents, self._depths, self._precedes)

    def settle(self, kept: Tensor, paths: Tensor, length: Tensor, tables: Tensor) -> None:
        """Move keys and values of accepted drafts. Nothing is read back from the device.

        Args:
            kept, paths: the results of `verify`.
            length: [R] int64, known tokens of each row before.
            tables: [R, B] integers, the rows' block tables.
        """
        order = torch.arange(paths.shape[1], device=length.device)
        first, held = length[:, None] - 1, order < kept[:, None]
        sources, targets = (first + torch.where(held, places, 0) for places in (paths, order))
        self._move(self._cells(tables, sources), self._cells(tables, targets))

    def _cells(self, tables: Tensor, places: Tensor) -> Tensor:
        """Return the cells of places [R, n] in the rows' sequences, [R n]."""
        blocks = tables.gather(1, places // self._size).long()
        return (blocks * self._size + places % self._size).flatten()


def kept_first(count: int, starts: Tensor, kept: Tensor, paths: Tensor) -> Tensor:
    """Return the order of drawn tokens [S] in which those that each row keeps come first, by their positions; of the
    others nothing is used.

    Args:
        count: S.
        starts: [R] int64, where the rows' tokens begin.
        kept, paths: the results of `Branches.verify`.
    """
    places = torch.arange(count + 1, device=starts.device)
    order = torch.arange(paths.shape[1], device=starts.device)
    targets = torch.where(order < kept[:, None], starts[:, None] + order, count)
    places[targets] = starts[:, None] + paths
    return places[:-1]


def in_batch(order: Tensor, tokens: Tensor, total: int) -> Tensor:
    """Return an order of a batch's tokens in which those with logits, `tokens` [S] int64, are in `order` [S]."""
    whole = torch.arange(total, device=order.device)
    whole[tokens] = tokens[order]
    return whole


def widen(attention: AnyBackend, tree: DraftTree | None) -> int:
    """Prepare the backend for rows with drafts of this shape, before its kernels are compiled. Return what it returns;
    0 if there is nothing to prepare."""
    return attention.widen(1 + len(tree)) if tree is not None and isinstance(attention, BranchingBackend) else 0


def branches_of(tree: DraftTree | None, attention: AnyBackend, blocks: Blocks) -> Branches | None:
    """Return what verifies drafts of this shape over a KV cache; None without a shape. Call `check_branches` before."""
    if tree is None:
        return None
    assert isinstance(attention, BranchingBackend)
    caches = blocks.caches
    return Branches(tree, blocks.size, caches.device, partial(attention.move, caches))


def check_branches(worker: Worker, key: str) -> None:
    """Raise ConfigError if the worker's model can't verify drafts that branch, for which the setting `key` asks."""
    reason = _reason_against(worker, worker.model.cached_layers if worker.model is not None else ())
    if reason is not None:
        raise ConfigError(
            f"{key} has branches, which {reason}. Set a chain, such as [(0,), (0, 0), (0, 0, 0)], or leave it out."
        )


def _reason_against(worker: Worker, layers: Iterable[CachedLayer]) -> str | None:
    if worker.stage.count > 1:
        return "the stages of a pipeline can't verify (--pipeline-parallel-size)"
    if worker.parallel.divides_requests:
        return "ranks with requests of their own can't verify (--data-parallel-size, --enable-expert-parallel)"
    if not isinstance(worker.attention, BranchingBackend):
        return f"the attention backend {worker.attention.name!r} can't verify (--attention-backend)"
    plain = all(
        isinstance(layer, PagedAttention) and layer.spec.window is None and layer.spec.slopes is None
        for layer in layers
    )
    if not plain or [group.kind for group in worker.cache_groups] != [GroupKind.FULL]:
        return "only models with full attention in all layers can verify"
    return None
