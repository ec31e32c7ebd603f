"""How models mark what they think before they answer."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """Reasoning stands between `begin` and `end`, first of all in the output; `begin` may end the prompt instead."""

    name: str
    begin: str
    end: str


THINK = ReasoningFormat("think", "<think>", "</think>")
MISTRAL_THINK = ReasoningFormat("mistral", "[THINK]", "[/THINK]")
FORMATS = {one.name: one for one in (THINK, MISTRAL_THINK)}
_ALIASES = {"qwen3": "think", "deepseek_r1": "think", "deepseek_v3": "think", "glm45": "think", "granite": "think"}


def reasoning_format(name: str) -> ReasoningFormat | None:
    """By its name, or by another server's name for it; None for "none".

    Raises:
        ConfigError: nobody knows it.
    """
    if name == "none":
        return None
    known = FORMATS.get(_ALIASES.get(name, name))
    if known is None:
        raise ConfigError(
            f"--reasoning-parser {name!r} is not known; choose auto, none or one of: {', '.join(FORMATS)}."
        )
    return known


def detect_reasoning(template: str) -> ReasoningFormat | None:
    """The marks that a chat template knows."""
    return next((one for one in FORMATS.values() if one.end in template), None)
