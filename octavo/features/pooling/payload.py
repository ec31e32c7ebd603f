"""The payload of a step."""

from __future__ import annotations

import msgspec

NAME = "pooling"


class PromptSpan(msgspec.Struct, frozen=True, array_like=True):
    """A part of a prompt in a step's batch.

    Attributes:
        row, slot: the batch's row, and the slot of its request.
        start, count: its tokens are [start, start + count) of the batch.
        first: position of its first token in the prompt.
        ends: whether the prompt ends with it.
    """

    row: int
    slot: int
    start: int
    count: int
    first: int
    ends: bool


class PromptSpans(msgspec.Struct):
    """The parts of prompts that a step computes for pooling."""

    spans: list[PromptSpan]


PAYLOAD = PromptSpans
