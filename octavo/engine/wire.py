"""The messages between front ends and an engine core, and their encoding (msgspec's MessagePack).

A front end that is gone says nothing: its connection ends, and with it its requests.
"""

from __future__ import annotations

import msgspec

from octavo.core.info import ModelInfo
from octavo.core.output import TokenDelta
from octavo.core.request import GenerateRequest
from octavo.core.stats import EngineStats


class Hello(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A front end is there and wants to know when the core is ready."""


class Add(msgspec.Struct, frozen=True, tag=True, array_like=True):
    request: GenerateRequest


class Abort(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """End a request, or one of its choices."""

    id: str
    index: int | None = None


class Reset(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Forget the KV cache of past prompts."""


class Shutdown(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Stop now; what still runs is aborted."""


class Phase(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A phase of the start has ended, after so many seconds; or has begun, if None."""

    name: str
    seconds: float | None = None


class Ready(msgspec.Struct, frozen=True, tag=True, array_like=True):
    info: ModelInfo


class Failed(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The core could not start; `kind` is the error's class in `core.errors`, or another name for a bug."""

    kind: str
    message: str


class Refused(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A request that can never run; the fields of `InvalidRequestError`."""

    id: str
    message: str
    param: str | None


class News(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """What a step brought to this front end's requests; sent after every step, even if it brought nothing.

    Attributes:
        stats: now and then, and always when nothing is left to do.
    """

    deltas: list[TokenDelta]
    stats: EngineStats | None = None


ToCore = Hello | Add | Abort | Reset | Shutdown
ToClient = Phase | Ready | Failed | Refused | News

encode = msgspec.msgpack.Encoder().encode
decode_to_core = msgspec.msgpack.Decoder(ToCore).decode
decode_to_client = msgspec.msgpack.Decoder(ToClient).decode
