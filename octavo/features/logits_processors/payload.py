"""What the engine half sends with a step."""

from __future__ import annotations

import msgspec

from octavo.core.params import SamplingParams

NAME = "logits_processors"


class Share(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A row that processors take part in.

    Attributes:
        processors: which, by number.
        start, output: the output's tokens from this one on.
        params, prompt: told until the worker half is sure to have them.
    """

    slot: int
    processors: list[int]
    start: int
    output: list[int]
    params: SamplingParams | None = None
    prompt: list[int] | None = None


class Shares(msgspec.Struct):
    """The rows of a step that processors take part in."""

    rows: list[Share]


PAYLOAD = Shares
