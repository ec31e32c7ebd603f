"""`CacheGroup`: layers that keep the same kind of KV, and so share one block table per sequence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

NO_BLOCK = -1
"""Entry of a block table where the group keeps no block, because no later token reads its positions."""


class GroupKind(StrEnum):
    """How a layer's KV grows with the sequence.

    FULL: a block for every `block_size` positions; also latent attention, whose blocks hold other vectors.
    WINDOW: the same, but positions behind the window are never read again, so their blocks are released.
    STATE: one block per sequence, overwritten at every step (a recurrent state).
    """

    FULL = "full"
    WINDOW = "window"
    STATE = "state"


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Layers of one kind. All groups of a model take blocks from one pool, so their blocks have the same size.

    Attributes:
        layers: indices of the model's layers, in order. Layer i of every group shares the i-th cache tensor.
        together: layers that share a cache tensor beside each other, since each needs only a part of its blocks. With
            k of them, it is tensor i / k, rounded down.
        window: positions that a token of a WINDOW group reads, its own included.
        snapshot_tokens: a STATE is kept for other requests at multiples of this many positions; a multiple of the
            block size. 0 keeps none, so prompts with a common prefix share nothing.
    """

    kind: GroupKind = GroupKind.FULL
    layers: tuple[int, ...] = ()
    window: int = 0
    snapshot_tokens: int = 0
    together: int = 1

    def __post_init__(self) -> None:
        if (self.kind is GroupKind.WINDOW) != (self.window > 0):
            raise ValueError(f"a group of kind {self.kind} can't have a window of {self.window}")

    @property
    def num_tensors(self) -> int:
        """Cache tensors that its layers take."""
        return -(-len(self.layers) // self.together)

    @property
    def grows(self) -> bool:
        """Whether a longer sequence needs more blocks."""
        return self.kind is not GroupKind.STATE

    def first_read(self, position: int) -> int:
        """Return the first position that the token at `position` reads."""
        return max(0, position - self.window + 1) if self.kind is GroupKind.WINDOW else 0

    def most_blocks(self, num_tokens: int, block_size: int, step_tokens: int) -> int:
        """Return the most blocks that a sequence of `num_tokens` holds at any time.

        A WINDOW group holds the window before a step, the tokens that the step writes, and those that steps in flight
        read; the latter two are bounded by `step_tokens` each.
        """
        if not self.grows:
            return 2  # the state, and the copy that the next step writes while the first is kept as a snapshot
        everything = -(-num_tokens // block_size)
        if self.kind is GroupKind.FULL:
            return everything
        return min(everything, -(-(self.window + 2 * step_tokens) // block_size) + 1)


_MOST_GROUPS = 8
"""Aim for at most about this many groups, since each costs a block table and a plan of its attention per step."""

FULL = (CacheGroup(),)
"""The groups of a model whose layers all use full attention."""


def attending(window: int | None) -> CacheGroup:
    """Return the kind of group of an attention layer with a sliding window of this many tokens; None for none."""
    return CacheGroup() if window is None else CacheGroup(GroupKind.WINDOW, window=window)


def groups_of(kinds: Sequence[CacheGroup]) -> tuple[CacheGroup, ...]:
    """Return the groups of some layers.

    All groups have as many layers as the rarest kind, since a block holds one token range of all layers of a group. If
    the layers of a kind don't divide evenly, its last group has fewer and leaves part of its blocks unused. If the
    rarest kind is so rare that there would be many groups, they have more layers than it.

    Args:
        kinds: what each layer keeps: a group without layers.
    """
    alike = {kind: [i for i, each in enumerate(kinds) if each == kind] for kind in kinds}
    tensors = [-(-len(layers) // kind.together) for kind, layers in alike.items()]
    size = max(min(tensors, default=1), -(-sum(tensors) // _MOST_GROUPS))
    return tuple(
        replace(kind, layers=tuple(layers[first : first + size * kind.together]))
        for kind, layers in alike.items()
        for first in range(0, len(layers), size * kind.together)
    )


def blocks_held(groups: Sequence[CacheGroup], num_tokens: int, block_size: int, step_tokens: int) -> int:
    """Return the most blocks that a sequence of `num_tokens` holds, over all groups."""
    return sum(group.most_blocks(num_tokens, block_size, step_tokens) for group in groups)
