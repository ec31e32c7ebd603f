"""A transfer has ended when it has in all ranks, in whatever order and however late they say so."""

from __future__ import annotations

from octavo.core.output import Moved, TransferState
from octavo.engine.rank_moves import RankMoves

READ, ENDED, UNKNOWN = TransferState.READ, TransferState.ENDED, TransferState.UNKNOWN


def test_reports_count_once_all_ranks_have_made_them() -> None:
    moves = RankMoves(2)
    moves.add(0, [Moved(1, READ), Moved(2, ENDED, [3])])
    assert moves.take() == []
    moves.add(1, [Moved(2, ENDED, [1, 3])])
    assert moves.take() == [Moved(2, ENDED, [1, 3])]
    moves.add(1, [Moved(1, ENDED)])
    assert moves.take() == [Moved(1, READ)]
    moves.add(0, [Moved(1, ENDED)])
    assert moves.take() == [Moved(1, ENDED)]


def test_a_rank_forgets_what_it_has_reported() -> None:
    """It is asked again after a failed step."""
    moves = RankMoves(2)
    moves.add(0, [Moved(1, ENDED)])
    moves.add(0, [Moved(1, UNKNOWN)])
    moves.add(1, [Moved(1, ENDED, [0])])
    assert moves.take() == [Moved(1, ENDED, [0])]
    moves.add(0, [Moved(2, UNKNOWN)])
    moves.add(1, [Moved(2, ENDED)])
    assert moves.take() == [Moved(2, UNKNOWN)]
