"""`PersistentBatch`: runs a processor of vLLM's V1 interface, which keeps a batch and receives its changes.

The interface is described in https://docs.vllm.ai/en/stable/design/logits_processors/: `update_state` gets the requests
added, removed or moved, by their index in the batch; `apply` gets one row of logits for each index.
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
    """How a request moves: to a free index, the only case here, or in exchange."""

    UNIDIRECTIONAL = enum.auto()
    SWAP = enum.auto()


@dataclass(frozen=True, slots=True)
class BatchUpdate:
    """Changes to the batch, applied in the order: removed, added, moved.

    Attributes:
        batch_size: requests in the batch afterwards, at indices 0 to batch_size - 1.
        removed: indices whose request left, except those that an added request takes.
        added: (index, params, prompt's token ids, output's token ids); the last list is live and grows.
        moved: (from, to, how).
    """

    batch_size: int
    removed: Sequence[int] = ()
    added: Sequence[tuple[int, SamplingParams, list[int], list[int]]] = ()
    moved: Sequence[tuple[int, int, MoveDirectionality]] = ()


@dataclass(slots=True)
class Places:
    """Assignment of rows to indices. Rows that stay keep theirs, except that the last one fills a gap.

    Attributes:
        rows: the row at each index.
    """

    rows: list[Row] = field(default_factory=list)

    def update(self, present: Sequence[Row]) -> BatchUpdate | None:
        """Change the batch to the `present` rows and return the update; None if nothing changes."""
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
        """Remove all rows, from at least `places` indices."""
        update = BatchUpdate(0, range(max(places, len(self.rows))))
        self.rows.clear()
        return update


class PersistentBatch(LogitsProcessor):
    """Accepts every request, since the interface has no way to refuse one.

    A processor that never changes the most likely token (`is_argmax_invariant`) is skipped for greedy requests.
    """

    def __init__(self, processor: Any) -> None:
        self._processor = processor
        self._places = Places()
        self._spares_greedy = bool(getattr(processor, "is_argmax_invariant", lambda: False)())

    def accepts(self, params: SamplingParams) -> bool:
        return not (self._spares_greedy and params.greedy)

    def apply(self, logits: Tensor, rows: Sequence[Row]) -> Tensor:
        import torch  # imported here: the engine half only calls `accepts`

        before = len(self._places.rows)
        try:
            self._processor.update_state(self._places.update(rows))
            row_at = {row: number for number, row in enumerate(rows)}
            order = torch.tensor([row_at[row] for row in self._places.rows], device=logits.device)
            changed = self._processor.apply(logits[order])
            return torch.empty_like(logits).index_copy_(0, order, changed)
        except Exception:
            # Whatever the processor raised, its state of the batch may be inconsistent.
            self._processor.update_state(self._places.clear(before))
            raise
