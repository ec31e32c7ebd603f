"""`PersistentBatch`: runs a processor of vLLM's V1 interface, which is told of changes to a batch that it remembers.

The interface is described in https://docs.vllm.ai/en/stable/design/logits_processors/: `update_state` hears of requests
that came, went or moved, by their place in the batch; `apply` gets one row of logits for each place.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from octavo.core.params import SamplingParams
from octavo.features.logits_processors.interface import LogitsProcessor, Row

if TYPE_CHECKING:
    from torch import Tensor


class MoveDirectionality(enum.Enum):
    """How a request moves: to a place that is free, which is all that happens here, or in exchange."""

    UNIDIRECTIONAL = enum.auto()
    SWAP = enum.auto()


@dataclass(frozen=True, slots=True)
class BatchUpdate:
    """What changed, to be taken in the order: removed, added, moved.

    Attributes:
        batch_size: places that are taken afterwards: 0 to batch_size - 1.
        removed: places whose request left; one that an added request takes is not among them.
        added: (place, params, prompt's token ids, output's token ids); the last list is the request's own and grows.
        moved: (from, to, how).
    """

    batch_size: int
    removed: Sequence[int] = ()
    added: Sequence[tuple[int, SamplingParams, list[int], list[int]]] = ()
    moved: Sequence[tuple[int, int, MoveDirectionality]] = ()


@dataclass(slots=True)
class Places:
    """Who sits where. Rows that stay keep their place unless the last of all must fill a hole.

    Attributes:
        rows: the row at each place.
    """

    rows: list[Row] = field(default_factory=list)

    def update(self, present: Sequence[Row]) -> BatchUpdate | None:
        """Seat those who are present and nobody else; None if nothing changes."""
        here, seated = set(present), set(self.rows)
        holes = [place for place, row in enumerate(self.rows) if row not in here]
        added = []
        for row in present:
            if row in seated:
                continue
            place = holes.pop(0) if holes else len(self.rows)
            self.rows[place : place + 1] = [row]
            added.append((place, row.params, row.prompt_ids, row.output_ids))
        if not added and not holes:
            return None
        moved = []
        for hole in holes:
            while self.rows and self.rows[-1] not in here:
                self.rows.pop()
            if hole < len(self.rows):
                self.rows[hole] = self.rows.pop()
                moved.append((len(self.rows), hole, MoveDirectionality.UNIDIRECTIONAL))
        return BatchUpdate(len(self.rows), holes, added, moved)

    def clear(self, places: int) -> BatchUpdate:
        """Everybody leaves, from so many places at least."""
        update = BatchUpdate(0, range(max(places, len(self.rows))))
        self.rows.clear()
        return update


class PersistentBatch(LogitsProcessor):
    """Takes part in every request, for such a processor does not say in which it does.

    One that leaves the most likely token alone (`is_argmax_invariant`) is spared the greedy ones.
    """

    def __init__(self, processor: Any) -> None:
        self._processor = processor
        self._places = Places()
        self._spares_greedy = bool(getattr(processor, "is_argmax_invariant", lambda: False)())

    def accepts(self, params: SamplingParams) -> bool:
        return not (self._spares_greedy and params.greedy)

    def apply(self, logits: Tensor, rows: Sequence[Row]) -> Tensor:
        import torch  # not for the engine half, which only asks whom it takes part in

        before = len(self._places.rows)
        try:
            self._processor.update_state(self._places.update(rows))
            row_at = {row: number for number, row in enumerate(rows)}
            order = torch.tensor([row_at[row] for row in self._places.rows], device=logits.device)
            changed = self._processor.apply(logits[order])
            return torch.empty_like(logits).index_copy_(0, order, changed)
        except Exception:
            # What it remembers of the batch can't be trusted any more.
            self._processor.update_state(self._places.clear(before))
            raise
