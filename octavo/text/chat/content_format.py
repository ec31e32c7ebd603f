"""Detection of the form in which a chat template takes message contents: one string, or OpenAI's list of parts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from jinja2 import nodes

ContentFormat = Literal["auto", "string", "openai"]
"""The form of contents passed to templates; "auto" detects it from the template's code."""


Taken = Literal["strings", "either", "parts"]
"""What a template reads as a content: only strings, strings and lists of parts, or only lists."""


def taken_by(template: nodes.Template) -> Taken:
    """Return what a template reads as a message's content.

    A template that loops over the parts reads lists; strings, too, if it asks everywhere before whether there is one.
    Messages are the variable `messages`, elements taken from it by a loop or index, and variables assigned from those.
    A content is their item or attribute `content`.
    """
    loops = list(_Known(template).loops(template, asked=False))
    if not loops:
        return "strings"
    return "either" if all(loops) else "parts"


def asks_for_none(template: nodes.Template) -> bool:
    """Return whether a template asks if a message's content is none."""
    known = _Known(template)
    return any(test.name == "none" and known.kind(test.node) == "content" for test in template.find_all(nodes.Test))


_Kind = Literal["messages", "message", "content"]


class _Known:
    """Names in a template that refer to messages, a message, or its content."""

    def __init__(self, template: nodes.Template) -> None:
        self._names: dict[str, _Kind] = {"messages": "messages"}
        loops, assigned = list(template.find_all(nodes.For)), list(template.find_all(nodes.Assign))
        before = 0
        while before < len(self._names):  # a name may be used before the line that assigns it
            before = len(self._names)
            for loop in loops:
                if self.kind(loop.iter) == "messages":
                    self._learn(loop.target, "message")
            for one in assigned:
                self._learn(one.target, self.kind(one.node))

    def loops(self, node: nodes.Node, *, asked: bool) -> Iterator[bool]:
        """Yield, for each loop over a content, whether it runs only where the content is known to be no string."""
        if isinstance(node, nodes.For) and self.kind(node.iter) == "content":
            yield asked
        if not isinstance(node, nodes.If):
            for child in node.iter_child_nodes():
                yield from self.loops(child, asked=asked)
            return
        decided = asked
        for branch in (node, *node.elif_):
            here = decided or self._asks(branch.test, alone=False)
            decided = decided or self._asks(branch.test, alone=True)
            for child in branch.body:
                yield from self.loops(child, asked=here)
        for child in node.else_:
            yield from self.loops(child, asked=decided)

    def _asks(self, test: nodes.Node, *, alone: bool) -> bool:
        """Return whether a condition asks if a content is a string; `alone`, whether it asks nothing else."""
        if isinstance(test, nodes.Test):
            return test.name == "string" and self.kind(test.node) == "content"
        if isinstance(test, nodes.Not | nodes.And | nodes.Or) and not (alone and isinstance(test, nodes.And)):
            return any(self._asks(part, alone=alone) for part in test.iter_child_nodes())
        return False

    def kind(self, node: nodes.Node) -> _Kind | None:
        """Return what an expression refers to."""
        if isinstance(node, nodes.Name):
            return self._names.get(node.name)
        if isinstance(node, nodes.Filter):
            return None if node.node is None else self.kind(node.node)
        if isinstance(node, nodes.CondExpr):
            return self.kind(node.expr1) or (None if node.expr2 is None else self.kind(node.expr2))
        if isinstance(node, nodes.Getattr):
            return "content" if node.attr == "content" and self.kind(node.node) == "message" else None
        if isinstance(node, nodes.Getitem):
            return self._item(self.kind(node.node), node.arg)
        return None

    def _item(self, kind: _Kind | None, place: nodes.Expr) -> _Kind | None:
        if kind == "messages":
            return "messages" if isinstance(place, nodes.Slice) else "message"
        named = isinstance(place, nodes.Const) and place.value == "content"
        return "content" if kind == "message" and named else None

    def _learn(self, target: nodes.Node, kind: _Kind | None) -> None:
        if isinstance(target, nodes.Name) and kind is not None:
            self._names.setdefault(target.name, kind)
