"""The payload of a step."""

from __future__ import annotations

import msgspec

from octavo.core.params import SamplingParams

NAME = "logits_processors"


class RowUpdate(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A row of an accepted request.

    Attributes:
        processors: indices of the processors that accepted it.
        start, output: output tokens from index `start` on.
        params, prompt: sent until the worker half is certain to have them.
    """

    slot: int
    processors: list[int]
    start: int
    output: list[int]
    params: SamplingParams | None = None
    prompt: list[int] | None = None


class Shares(msgspec.Struct):
    """The rows of accepted requests in a step."""

    rows: list[RowUpdate]


PAYLOAD = Shares
