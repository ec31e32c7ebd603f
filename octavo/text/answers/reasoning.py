"""How models mark the reasoning before their answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from octavo.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """Reasoning is between `begin` and `end`, at the start of the output; `begin` may end the prompt instead."""

    name: str
    begin: str
    end: str


THINK = ReasoningFormat("think", "<think>", "</think>")
MISTRAL_THINK = ReasoningFormat("mistral", "[THINK]", "[/THINK]")
GRANITE = ReasoningFormat("granite", "Here is my thought process:", "Here is my response:")
FORMATS = {one.name: one for one in (THINK, MISTRAL_THINK, GRANITE)}
_MARKS = ("reasoning_start_str", "reasoning_end_str")
_ALIASES = {"qwen3": "think", "deepseek_r1": "think", "deepseek_v3": "think", "glm45": "think"}


def reasoning_format(name: str) -> ReasoningFormat | None:
    """Return the format of a name, or of another server's name for it; None for "none".

    Raises:
        ConfigError: the name is unknown.
    """
    if name == "none":
        return None
    known = FORMATS.get(_ALIASES.get(name, name))
    if known is None:
        raise ConfigError(
            f"--reasoning-parser {name!r} is not known; choose auto, none or one of: {', '.join(FORMATS)}."
        )
    return known


def own_marks(config: Mapping[str, Any]) -> ReasoningFormat | None:
    """Return the marks that a setting gives as `reasoning_start_str` and `reasoning_end_str`; None if it gives none.

    Raises:
        ConfigError: an unknown field, or marks that are not two texts.
    """
    unknown = next((name for name in config if name not in _MARKS), None)
    if unknown is not None:
        raise ConfigError(f"--reasoning-config {unknown}: there is no such field; those are {', '.join(_MARKS)}.")
    given = [config.get(name) or None for name in _MARKS]
    if given == [None, None]:
        return None
    if not all(isinstance(mark, str) for mark in given):
        raise ConfigError(f"--reasoning-config: {' and '.join(_MARKS)} must both be texts.")
    return ReasoningFormat("own", *map(str, given))


def detect_reasoning(template: str) -> ReasoningFormat | None:
    """Return the marks that a chat template contains."""
    return next((one for one in FORMATS.values() if one.end in template), None)
