"""A parser of PromQL, as far as Octavo's dashboard and alerts use it.

https://prometheus.io/docs/prometheus/latest/querying/basics/
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

TOKEN = re.compile(
    r"\s*(?:(?P<name>[a-zA-Z_][a-zA-Z0-9_:]*)|(?P<number>\d+(?:\.\d+)?)|(?P<text>\"(?:[^\"\\]|\\.)*\")"
    r"|(?P<range>\[(?:\d+[smhd]|\$__rate_interval)\])|(?P<sign>==|!=|>=|<=|=~|!~|[-+*/<>=(){},]))"
)
FUNCTIONS = {"rate": 1, "increase": 1, "deriv": 1, "histogram_quantile": 2}
OF_RANGES = {"rate", "increase", "deriv"}
AGGREGATIONS = {"sum", "min", "max", "avg", "count"}
LOOSEST = [{"or"}, {"and", "unless"}, {"==", "!=", ">", "<", ">=", "<="}, {"+", "-"}, {"*", "/"}]
"""Binary operators, those that bind loosely first."""


@dataclass
class Selector:
    """A metric's samples.

    Attributes:
        matchers: (label, operator, value).
        ranged: those of a time range.
        grouped: labels that aggregations around it keep.
    """

    name: str
    matchers: list[tuple[str, str, str]] = field(default_factory=list)
    ranged: bool = False
    grouped: set[str] = field(default_factory=set)


class QueryError(ValueError):
    """The query is not PromQL, or more of it than this parser knows."""


def selectors(query: str) -> list[Selector]:
    """Parse a query; return what it selects."""
    parser = _Parser(query)
    found = parser.binary(0)
    if parser.kind:
        raise QueryError(f"{query}: {parser.text!r} is left over")
    return found


class _Parser:
    def __init__(self, query: str) -> None:
        self.query, self.place = query, 0
        self.kind, self.text = "", ""
        self.advance()

    def advance(self) -> str:
        before = self.text
        rest = self.query[self.place :]
        if not rest.strip():
            self.kind = self.text = ""
            return before
        match = TOKEN.match(rest)
        if match is None:
            raise QueryError(f"{self.query}: what is {rest[:20]!r}?")
        self.place += match.end()
        self.kind = match.lastgroup or ""
        self.text = match[self.kind]
        return before

    def take(self, text: str) -> None:
        if self.text != text:
            raise QueryError(f"{self.query}: {text!r} is missing before {self.text!r}")
        self.advance()

    def binary(self, level: int) -> list[Selector]:
        if level == len(LOOSEST):
            return self.primary()
        found = self.binary(level + 1)
        while self.text in LOOSEST[level]:
            self.advance()
            found = found + self.binary(level + 1)
        return found

    def primary(self) -> list[Selector]:
        if self.kind == "number":
            self.advance()
            return []
        if self.text == "(":
            self.advance()
            found = self.binary(0)
            self.take(")")
            return found
        if self.kind != "name":
            raise QueryError(f"{self.query}: {self.text!r} begins no expression")
        name = self.advance()
        if name in AGGREGATIONS:
            return self.aggregation()
        if name in FUNCTIONS:
            return self.call(name)
        return [self.selector(name)]

    def aggregation(self) -> list[Selector]:
        kept: set[str] = set()
        if self.text == "by":
            self.advance()
            self.take("(")
            while self.text != ")":
                kept.add(self.advance())
                if self.text == ",":
                    self.advance()
            self.take(")")
        self.take("(")
        found = self.binary(0)
        self.take(")")
        for one in found:
            one.grouped |= kept
        return found

    def call(self, name: str) -> list[Selector]:
        self.take("(")
        arguments = [self.binary(0)]
        while self.text == ",":
            self.advance()
            arguments.append(self.binary(0))
        self.take(")")
        if len(arguments) != FUNCTIONS[name]:
            raise QueryError(f"{self.query}: {name} has {len(arguments)} arguments")
        found = [one for argument in arguments for one in argument]
        if name in OF_RANGES and not all(one.ranged for one in found):
            raise QueryError(f"{self.query}: {name} needs a range")
        return found

    def selector(self, name: str) -> Selector:
        found = Selector(name)
        if self.text == "{":
            self.advance()
            while self.text != "}":
                label, operator, value = self.advance(), self.advance(), self.advance()
                if operator not in ("=", "!=", "=~", "!~") or not value.startswith('"'):
                    raise QueryError(f"{self.query}: {label}{operator}{value} is no matcher")
                found.matchers.append((label, operator, value[1:-1]))
                if self.text == ",":
                    self.advance()
            self.take("}")
        if self.kind == "range":
            self.advance()
            found.ranged = True
        return found
