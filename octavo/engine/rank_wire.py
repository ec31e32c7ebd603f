"""The messages between an engine and a rank, which is a process with a worker (msgspec's MessagePack).

A rank does what it is sent in that order, as an executor in the engine's process would, and sends back what is asked
for. Only reading weights goes on beside it.
"""

from __future__ import annotations

from typing import Any

import msgspec

from octavo.core.output import StepOutput
from octavo.engine.failure import Failure


class Forward(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Launch a step; `plan` is encoded by a `PlanCodec`."""

    step: int
    plan: bytes


class Sample(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Sample a launched step; `payload` is encoded likewise."""

    step: int
    payload: bytes


class Fetch(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Wait for a step and answer with `Output` or `StepFailed`. Earlier steps are not asked for any more."""

    step: int


class Call(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Call one of the rank's methods with arguments of built-in types; answered by `Reply`."""

    number: int
    method: str
    args: list[Any]


class Output(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A step's tokens."""

    step: int
    output: StepOutput


class StepFailed(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The step can't be computed; `lost` says that nothing can be any more, and why."""

    step: int
    failure: Failure
    lost: str | None


class Reply(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """What a method returned, encoded, or its failure; `lost` as in `StepFailed`."""

    number: int
    value: msgspec.Raw
    failure: Failure | None = None
    lost: str | None = None


ToRank = Forward | Sample | Fetch | Call
FromRank = Output | StepFailed | Reply

encode = msgspec.msgpack.Encoder().encode
decode_to_rank = msgspec.msgpack.Decoder(ToRank).decode
decode_from_rank = msgspec.msgpack.Decoder(FromRank).decode
