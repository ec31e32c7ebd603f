"""Detection of the form in which a chat template takes message contents: one string, or OpenAI's list of parts."""

from __future__ import annotations

from typing import Literal

from jinja2 import nodes

ContentFormat = Literal["auto", "string", "openai"]
"""The form of contents passed to templates; "auto" detects it from the template's code."""


def takes_parts(template: nodes.Template) -> bool:
    """Return whether a template loops over the parts of a message's content.

    Messages are the variable `messages`, elements taken from it by a loop or index, and variables assigned from those.
    A content is their item or attribute `content`.
    """
    known = _Known(template)
    return any(known.kind(loop.iter) == "content" for loop in template.find_all(nodes.For))


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
