"""What the halves of the feature share: its name, a request's option, and the engine's facts. There is no payload."""

from __future__ import annotations

import msgspec

NAME = "speculation"


class SpeculationOption(msgspec.Struct, frozen=True, array_like=True):
    """A request's input of the engine half and the worker half.

    Attributes:
        enabled: False for a request that is decoded without drafts.
        num_prompt: number of tokens of its prompt.
        prediction: tokens of the text that the client expects as the output; empty without one.
    """

    enabled: bool = True
    num_prompt: int = 0
    prediction: list[int] = []


def option_of(options: msgspec.Raw | None) -> SpeculationOption:
    """Return a request's option from its encoded form; None is the default."""
    return SpeculationOption() if options is None else msgspec.msgpack.decode(options, type=SpeculationOption)


class DraftCounts(msgspec.Struct, frozen=True, array_like=True):
    """The engine half's result for one choice: its drafts that were verified."""

    accepted: int
    rejected: int


class DraftInfo(msgspec.Struct, frozen=True, array_like=True):
    """The feature's entry in `ModelInfo.feature_info`: the method, the most drafts after a token, whether only where
    they gain, and whether a request's prediction is drafted."""

    method: str
    most: int
    adaptive: bool
    predicts: bool = True
