"""Words for an engine that stands still: how it pauses, and what of it sleeps."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

from octavo.core.errors import InvalidRequestError


class PauseMode(StrEnum):
    """What a pause does to the requests there are; later ones wait for its end in any case."""

    ABORT = "abort"
    """They end, with what they have."""
    WAIT = "wait"
    """They are finished first."""
    KEEP = "keep"
    """They stand still, and go on at the end of the pause."""


class Part(StrEnum):
    """What sleeps, and is woken by this name."""

    WEIGHTS = "weights"
    KV_CACHE = "kv_cache"
    SCHEDULING = "scheduling"


AWAKE = -1
"""The sleep level of an engine that does not sleep."""
SLEEP_LEVELS = (0, 1, 2)
"""0 only stands still. 1 gives the KV cache back, and a GPU's weights to the host. 2 gives both back; the weights are
read again at the wake-up."""


def pause_mode(mode: str, name: str = "mode") -> PauseMode:
    """
    Raises:
        InvalidRequestError: there is no such mode.
    """
    if mode not in list(PauseMode):
        raise InvalidRequestError(f"mode must be one of {', '.join(PauseMode)}.", param=name, value=mode)
    return PauseMode(mode)


def sleep_level(level: int, name: str = "level") -> int:
    """
    Raises:
        InvalidRequestError: there is no such level.
    """
    if level not in SLEEP_LEVELS:
        raise InvalidRequestError("level must be 0, 1 or 2.", param=name, value=level)
    return level


def wake_tags(tags: Sequence[str] | None, name: str = "tags") -> list[Part]:
    """What is to be woken; None or nothing for all.

    Raises:
        InvalidRequestError: there is no such part.
    """
    for tag in tags or ():
        if tag not in list(Part):
            raise InvalidRequestError(f"tags must be among {', '.join(Part)}.", param=name, value=tag)
    return [Part(tag) for tag in tags or Part]
