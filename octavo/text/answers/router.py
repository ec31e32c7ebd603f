"""`Router`: splits the text of one choice into reasoning, content and tool calls while it streams.

It looks for the literals from which the output's grammar is made (`plan.py`), so under that grammar parsing is
unambiguous. The concatenated pieces do not depend on how the text was cut.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from octavo.text.answers.reasoning import ReasoningFormat
from octavo.text.answers.repeated import RepeatedCalls
from octavo.text.tools.formats import ToolFormat
from octavo.text.tools.keyed import KeyedReader, ValueKind
from octavo.text.tools.scan import ObjectScan, begun

PieceKind = Literal["reasoning", "content", "call"]
Kinds = Mapping[str, Mapping[str | None, ValueKind]]
"""Function -> argument -> how its value is written; None stands for all arguments that are not declared."""


@dataclass(slots=True)
class AnswerPiece:
    """New text. The first piece of a call has its `name`, and its `id` if the model wrote one; later ones have more of
    its arguments, as JSON."""

    kind: PieceKind
    text: str
    call: int = -1
    name: str | None = None
    id: str | None = None


class Router:
    """
    Attributes:
        transparent: all text is content.
        repeated: a call was identical to an earlier one, and `once` is set.

    Args:
        tools: how calls are written; None routes none.
        kinds: function -> argument -> how its value is written, for formats that write arguments one by one.
        forced: the output consists of calls.
        apart: the output is either content or calls; content may contain the marks of calls.
        reasoning: how reasoning is marked; None routes none.
        once: a call that is identical to an earlier one (name, and arguments as written) ends the list of calls, and is
            left out together with all that follows it.
        inside: the prompt ends within reasoning.
    """

    def __init__(
        self,
        *,
        tools: ToolFormat | None = None,
        kinds: Kinds | None = None,
        forced: bool = False,
        apart: bool = False,
        once: bool = False,
        reasoning: ReasoningFormat | None = None,
        inside: bool = False,
    ) -> None:
        self.calls = 0
        self.repeated = False
        self.transparent = tools is None and reasoning is None
        self._tools = tools
        self._kinds = kinds or {}
        self._forced = forced
        self._apart = apart
        self._reasoning = reasoning
        self._text = ""
        self._pieces: list[AnswerPiece] = []
        self._scan: ObjectScan | KeyedReader = ObjectScan()
        self._skip = 0
        self._repeats = RepeatedCalls() if once else None
        begins_inside = inside and reasoning is not None
        self._step: Callable[[bool], bool] = (
            self._before_reasoning if begins_inside else self._undecided if reasoning else self._begin_body
        )

    @property
    def in_reasoning(self) -> bool:
        return self._step in (self._before_reasoning, self._in_reasoning)

    @property
    def in_arguments(self) -> bool:
        """Whether the arguments of a call have begun and not ended."""
        return self._step == self._arguments

    def push(self, text: str) -> list[AnswerPiece]:
        """Add text. Return the pieces that are certain now."""
        self._text += text
        return self._advance(end=False)

    def flush(self) -> list[AnswerPiece]:
        """Return the rest, at the end of the text. Incomplete frame text of a call is dropped."""
        return self._advance(end=True)

    def _advance(self, *, end: bool) -> list[AnswerPiece]:
        while self._step(end):
            pass
        if end and self._repeats is not None and not self.repeated:
            self._pieces += self._repeats.release()
        pieces, self._pieces = self._pieces, []
        return pieces

    # Each step consumes what it can, and returns whether the next step should run.

    def _undecided(self, end: bool) -> bool:
        """Decide whether the output begins with reasoning, once the text is long enough."""
        assert self._reasoning is not None
        begin, seen = self._reasoning.begin, self._text.lstrip()
        if seen.startswith(begin):
            self._text = seen[len(begin) :]
            self._step = self._before_reasoning
            return True
        if begin.startswith(seen) and not end:
            return False
        self._step = self._begin_body
        return True

    def _before_reasoning(self, end: bool) -> bool:
        self._text = self._text.lstrip()
        if not self._text:
            return False
        self._step = self._in_reasoning
        return True

    def _in_reasoning(self, end: bool) -> bool:
        assert self._reasoning is not None
        if not self._upto(self._reasoning.end, "reasoning", end):
            return False
        self._step = self._after_reasoning
        return True

    def _after_reasoning(self, end: bool) -> bool:
        self._text = self._text.lstrip()
        if not self._text:
            return False
        self._step = self._begin_body
        return True

    def _begin_body(self, end: bool) -> bool:
        tools = self._tools
        if tools is None:
            self._step = self._plain
        elif self._forced:
            self._expect(tools.opening)
        elif self._apart:
            return self._content_or_calls(tools.opening, end)
        elif tools.trigger:
            self._step = self._content
        elif not self._text:
            return False
        elif self._text.startswith(tools.opening[0]):
            self._expect(tools.opening)
        else:
            self._step = self._plain
        return True

    def _content_or_calls(self, opening: str, end: bool) -> bool:
        if self._text.startswith(opening):
            self._expect(opening)
        elif opening.startswith(self._text) and not end:
            return False
        else:
            self._step = self._plain
        return True

    def _plain(self, end: bool) -> bool:
        self._emit("content", self._text)
        self._text = ""
        return False

    def _content(self, end: bool) -> bool:
        """Read content, in which calls may begin."""
        assert self._tools is not None
        if not self._upto(self._tools.trigger, "content", end):
            return False
        self._expect(self._tools.opening[len(self._tools.trigger) :])
        return True

    def _expect(self, literal: str) -> None:
        """Expect a literal of the format, followed by a name."""
        self._skip = len(literal)
        self._step = self._literal

    def _literal(self, end: bool) -> bool:
        if len(self._text) < self._skip:
            return False
        self._text = self._text[self._skip :]
        self._step = self._name
        return True

    def _name(self, end: bool) -> bool:
        form = self._tools
        assert form is not None
        place = self._text.find(form.name_end)
        if place < 0:
            return False
        written = self._text[:place]
        name, mark, _ = written.rpartition(form.numbered) if form.numbered else (written, "", "")
        own = form.id_prefix + written if mark else None
        self._text = self._text[place + len(form.name_close) :]
        self._add_call(AnswerPiece("call", "", self.calls, name if mark else written, own))
        kinds = self._kinds.get(name, {})
        self._scan = KeyedReader(form.keyed, form.call_close, kinds) if form.keyed else ObjectScan()
        self._step = self._arguments
        return True

    def _arguments(self, end: bool) -> bool:
        assert self._tools is not None
        if isinstance(self._scan, KeyedReader):
            said, length = self._scan.take(self._text)
        else:
            length = self._scan.take(self._text)
            said = self._text[:length]
        if said:
            self._add_call(AnswerPiece("call", said, self.calls))
        self._text = self._text[length:]
        if not self._scan.complete:
            return False
        if self._repeats is not None and self._repeats.end_call():
            self.repeated = True
            self._step = self._ignore
            return True
        self.calls += 1
        self._expect(self._tools.call_close + self._tools.separator + self._tools.call_open)
        return True

    def _add_call(self, piece: AnswerPiece) -> None:
        self._pieces += [piece] if self._repeats is None else self._repeats.add(piece)

    def _ignore(self, end: bool) -> bool:
        self._text = ""
        return False

    def _upto(self, mark: str, kind: PieceKind, end: bool) -> bool:
        """Emit the text before `mark`, without the white space around the mark. Return whether the mark was found."""
        place = self._text.find(mark)
        if place >= 0:
            self._emit(kind, self._text[:place].rstrip())
            self._text = self._text[place + len(mark) :]
            return True
        keep = 0 if end else _held(self._text, mark)
        ready = self._text[: len(self._text) - keep]
        self._emit(kind, ready)
        self._text = self._text[len(ready) :]
        return False

    def _emit(self, kind: PieceKind, text: str) -> None:
        if text:
            self._pieces.append(AnswerPiece(kind, text))


def _held(text: str, mark: str) -> int:
    """Return the length of the suffix of `text` that may be white space and a beginning of the mark."""
    part = begun(text, mark)
    body = text[: len(text) - part]
    return len(text) - len(body.rstrip())
