"""Pause modes, sleep levels, and the parts of an engine that sleep."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

from octavo.core.errors import InvalidRequestError


class PauseMode(StrEnum):
    """What a pause does to existing requests. New requests always wait for its end."""

    ABORT = "abort"
    """Abort them; they keep their output so far."""
    WAIT = "wait"
    """Finish them first."""
    KEEP = "keep"
    """Freeze them, and continue them after the pause."""


class SleepTag(StrEnum):
    """Parts of an engine that sleep and can be woken separately."""

    WEIGHTS = "weights"
    KV_CACHE = "kv_cache"
    SCHEDULING = "scheduling"


AWAKE = -1
"""The sleep level of an awake engine."""
SLEEP_LEVELS = (0, 1, 2)
"""0 only pauses. 1 frees the KV cache, and moves a GPU's weights to the host. 2 frees both; the weights are read again
at the wake-up."""


def pause_mode(mode: str, name: str = "mode") -> PauseMode:
    """Return the pause mode with this name.

    Args:
        mode: the mode's name.
        name: the request's field, for errors.

    Raises:
        InvalidRequestError: there is no such mode.
    """
    if mode not in list(PauseMode):
        raise InvalidRequestError(f"mode must be one of {', '.join(PauseMode)}.", param=name, value=mode)
    return PauseMode(mode)


def sleep_level(level: int, name: str = "level") -> int:
    """Return the level, checked.

    Args:
        level: the sleep level.
        name: the request's field, for errors.

    Raises:
        InvalidRequestError: there is no such level.
    """
    if level not in SLEEP_LEVELS:
        raise InvalidRequestError("level must be 0, 1 or 2.", param=name, value=level)
    return level


def wake_tags(tags: Sequence[str] | None, name: str = "tags") -> list[SleepTag]:
    """Return the parts to wake.

    Args:
        tags: names of parts; None or empty for all.
        name: the request's field, for errors.

    Raises:
        InvalidRequestError: there is no such part.
    """
    for tag in tags or ():
        if tag not in list(SleepTag):
            raise InvalidRequestError(f"tags must be among {', '.join(SleepTag)}.", param=name, value=tag)
    return [SleepTag(tag) for tag in tags or SleepTag]
