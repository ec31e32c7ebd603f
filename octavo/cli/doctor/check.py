"""`Check` and `Finding`: a question about this machine, and its answer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Generic, TypeVar

from octavo.config import EngineConfig, ServerConfig

F = TypeVar("F")


class Result(StrEnum):
    FINE = "fine"
    WARNING = "warning"
    BROKEN = "broken"


@dataclass(frozen=True, slots=True)
class Finding:
    """The answer to a check.

    Attributes:
        text: what was found, with the numbers.
        remedy: what to do, with the command; "" if it is fine.
    """

    result: Result
    text: str
    remedy: str = ""


def fine(text: str) -> Finding:
    return Finding(Result.FINE, text)


def warning(text: str, remedy: str) -> Finding:
    """Return the finding that something works less well, or may fail later."""
    return Finding(Result.WARNING, text, remedy)


def broken(text: str, remedy: str) -> Finding:
    """Return the finding that something does not work."""
    return Finding(Result.BROKEN, text, remedy)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What is to be checked.

    Attributes:
        engine, server: the settings that the server would be started with.
        has_model: a model was named.
        has_address: so was the server's address.
        quick: leave out checks that import torch, compile, or compute.
        online: ask the model hub, too.
    """

    engine: EngineConfig
    server: ServerConfig
    has_model: bool = False
    has_address: bool = False
    quick: bool = False
    online: bool = False


@dataclass(frozen=True, slots=True)
class Check(Generic[F]):
    """A check of facts. `judge` returns None where the check has no meaning, such as that of a driver without a GPU."""

    name: str
    judge: Callable[[F], Finding | None]


@dataclass(frozen=True, slots=True)
class Area(Generic[F]):
    """Checks of the same facts.

    Attributes:
        read: reads the facts from this machine; None if the area is not wished.
    """

    name: str
    read: Callable[[Wish], F | None]
    checks: tuple[Check[F], ...]

    def run(self, wish: Wish) -> Iterator[tuple[str, Finding]]:
        """Yield (name of the check, finding). A check that fails itself is a finding, too: the others go on."""
        try:
            facts = self.read(wish)
        except Exception as error:
            yield self.name, _failed(error)
            return
        if facts is None:
            return
        for check in self.checks:
            try:
                found = check.judge(facts)
            except Exception as error:
                found = _failed(error)
            if found is not None:
                yield check.name, found


def listed(problems: Iterable[str]) -> str:
    return "; ".join(problems)


def _failed(error: Exception) -> Finding:
    text = f"it could not be examined: {type(error).__name__}: {error}"
    return warning(text, "this is a fault of octavo doctor: report it with this text")
