"""`RepeatedCalls`: detects a tool call identical to an earlier one before any of it is sent."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from octavo.text.answers.router import AnswerPiece


class RepeatedCalls:
    """Holds back the pieces of a call while it may still be identical to an earlier one."""

    def __init__(self) -> None:
        self._earlier: set[tuple[str, str]] = set()
        self._name = ""
        self._arguments = ""
        self._held: list[AnswerPiece] = []

    def add(self, piece: AnswerPiece) -> list[AnswerPiece]:
        """Add a piece of a call. Return the pieces that can be passed on now."""
        if piece.name is not None:
            self._name, self._arguments = piece.name, ""
        self._arguments += piece.text
        self._held.append(piece)
        return [] if self._may_repeat() else self.release()

    def end_call(self) -> bool:
        """End a call. Return whether it is identical to an earlier one."""
        call = self._name, self._arguments
        repeated = call in self._earlier
        self._earlier.add(call)
        return repeated

    def release(self) -> list[AnswerPiece]:
        """Return the pieces that were held back."""
        held, self._held = self._held, []
        return held

    def _may_repeat(self) -> bool:
        return any(name == self._name and said.startswith(self._arguments) for name, said in self._earlier)
