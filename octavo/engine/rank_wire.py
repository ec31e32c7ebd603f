"""The messages between an engine and a rank, a process with a worker (msgspec's MessagePack).

A rank executes messages in order, as an executor in the engine's process would, and replies where a message says so.
Only weights are read concurrently.
"""

from __future__ import annotations

from typing import Any

import msgspec

from octavo.core.output import Moved, StepOutput
from octavo.engine.failure import Failure


class LaunchStep(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Launch a step. `plan` is encoded by a `PlanCodec`."""

    step: int
    plan: bytes


class SampleStep(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Sample a launched step. `payload` is encoded by a `PlanCodec`."""

    step: int
    payload: bytes


class FetchOutput(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Wait for a step and reply with `RankOutput` or `StepFailed`. Earlier steps will not be fetched any more."""

    step: int


class CallMethod(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Call one of the rank's methods with arguments of built-in types. The answer is a `RankReply`."""

    number: int
    method: str
    args: list[Any]


class RankOutput(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A step's output."""

    step: int
    output: StepOutput


class RankMoved(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Reports of transfers, of a rank that does not send the steps' outputs."""

    moved: list[Moved]


class StepFailed(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The step failed. `lost`: why the device is lost; None if it is not."""

    step: int
    failure: Failure
    lost: str | None


class RankReply(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A method's encoded result, or its failure. `lost` as in `StepFailed`."""

    number: int
    value: msgspec.Raw
    failure: Failure | None = None
    lost: str | None = None


ToRank = LaunchStep | SampleStep | FetchOutput | CallMethod
FromRank = RankOutput | RankMoved | StepFailed | RankReply

encode = msgspec.msgpack.Encoder().encode
decode_to_rank = msgspec.msgpack.Decoder(ToRank).decode
decode_from_rank = msgspec.msgpack.Decoder(FromRank).decode
