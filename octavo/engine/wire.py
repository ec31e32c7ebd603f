"""The messages between front ends and an engine core, and their encoding (msgspec's MessagePack).

A front end that is gone says nothing: its connection ends, and with it its requests.
"""

from __future__ import annotations

from typing import Any

import msgspec

from octavo.core.info import ModelInfo
from octavo.core.output import TokenDelta
from octavo.core.pausing import Part, PauseMode
from octavo.core.request import GenerateRequest
from octavo.core.stats import EngineStats


class Hello(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A front end is there and wants to know when the core is ready."""


class Add(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Queue a request; what comes of it is in `News`, or `Refused`."""

    request: GenerateRequest


class Abort(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """End a request, or one of its choices."""

    id: str
    index: int | None = None


class Reset(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Forget the KV cache of past prompts."""


class Pause(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Pause, and forget the KV cache of past prompts if asked to; like those below, answered by `Done` once it is so.

    Attributes:
        call: a number of the sender's for the answer.
    """

    call: int
    mode: PauseMode
    clear_cache: bool


class Resume(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """End a pause."""

    call: int


class Sleep(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Pause, then give memory back; see `core/pausing.py`."""

    call: int
    level: int
    mode: PauseMode


class WakeUp(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Take the memory of these parts again."""

    call: int
    parts: list[Part]


class AbortNamed(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """End the requests that answer to one of these names, or all if None; see `answers_to`."""

    call: int
    names: list[str] | None


class StartProfile(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Note what each step does, in a file whose name begins with the prefix."""

    call: int
    prefix: str


class StopProfile(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """End that; answered with the path of the file."""

    call: int


class UpdateWeights(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Compute with other weights; answered with their name and the number of requests that stood still for it.

    Attributes:
        path: of a model on the core's machine; None for the files that were read last.
        received: take what `ReceiveWeights` brought instead.
        mode: what becomes of requests that run, unless there is a pause.
        flush_cache: forget what was computed with the old weights.
        version: a name; None for one of the core's.
    """

    call: int
    path: str | None
    load_format: str | None
    received: bool
    mode: PauseMode
    flush_cache: bool
    version: str | None


class BeginWeights(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Tensors will be sent."""

    call: int


class ReceiveWeights(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Some of them are there."""

    call: int
    update_info: dict[str, Any]


class Shutdown(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Stop now; what still runs is aborted."""


class Phase(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A phase of the start has ended, after so many seconds; or has begun, if None."""

    name: str
    seconds: float | None = None


class Ready(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The core takes requests."""

    info: ModelInfo


class Failed(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The core could not start; `kind` is the error's class in `core.errors`, or another name for a bug."""

    kind: str
    message: str


class Lost(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The core's last message: its device is lost, every request ends with this error, and the process ends."""

    message: str


class Refused(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A request that can never run; the fields of `InvalidRequestError`."""

    id: str
    message: str
    param: str | None


class Done(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """What was asked for is so.

    Attributes:
        value: what came of it, of built-in types.
        param: the field at fault, if one is.
        kind: why it is not so: the error's class in `core.errors`, or another name for a bug; None if it is.
    """

    call: int
    value: Any = None
    kind: str | None = None
    message: str = ""
    param: str | None = None


class News(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """What a step brought to this front end's requests; sent after every step, even if it brought nothing.

    Attributes:
        stats: now and then, and always when nothing is left to do.
    """

    deltas: list[TokenDelta]
    stats: EngineStats | None = None


WeightCommand = UpdateWeights | BeginWeights | ReceiveWeights
Command = Pause | Resume | Sleep | WakeUp | AbortNamed | StartProfile | StopProfile | WeightCommand
ToCore = Hello | Add | Abort | Reset | Command | Shutdown
ToClient = Phase | Ready | Failed | Lost | Refused | Done | News

encode = msgspec.msgpack.Encoder().encode
decode_to_core = msgspec.msgpack.Decoder(ToCore).decode
decode_to_client = msgspec.msgpack.Decoder(ToClient).decode
