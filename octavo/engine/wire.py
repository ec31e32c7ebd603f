"""The messages between front ends and an engine core, and their encoding (msgspec's MessagePack).

When a front end disconnects, its requests are aborted.
"""

from __future__ import annotations

from typing import Any

import msgspec

from octavo.core.info import ModelInfo
from octavo.core.output import TokenDelta
from octavo.core.pausing import PauseMode, SleepTag
from octavo.core.request import GenerateRequest
from octavo.core.stats import EngineStats
from octavo.engine.failure import Failure


class Hello(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A front end has connected; the core replies with `Ready` when it is ready."""


class Add(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Queue a request. The replies are `StepDeltas`, or `RequestRefused`."""

    request: GenerateRequest


class Abort(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """End a request, or one of its choices."""

    id: str
    index: int | None = None


class Reset(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Drop past prompts from the KV cache. This and the commands below are answered by `Done` when they are complete.

    Attributes:
        call: the sender's number for this command; `Done` repeats it.
    """

    call: int


class Pause(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Pause.

    Attributes:
        mode: what happens to running requests.
        clear_cache: drop past prompts from the KV cache; no effect under KEEP.
    """

    call: int
    mode: PauseMode
    clear_cache: bool


class Resume(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """End a pause."""

    call: int


class Sleep(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Pause, then free memory; see `core/pausing.py`."""

    call: int
    level: int
    mode: PauseMode


class WakeUp(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Allocate the memory of these parts again."""

    call: int
    parts: list[SleepTag]


class AbortNamed(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Abort the requests with one of these names, or all if None; see `answers_to`. The result is their number."""

    call: int
    names: list[str] | None


class StartProfile(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Profile steps into a file whose name begins with the prefix."""

    call: int
    prefix: str


class StopProfile(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Stop the profile. The result is the path of the file."""

    call: int


class UpdateWeights(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Replace the weights. The result is their name and the number of requests that were paused for it.

    Attributes:
        path: of a model on the core's machine; None for the files that were read last.
        load_format: format of the checkpoint; None to detect it.
        received: use the tensors of `ReceiveWeights` instead.
        mode: what the pause does to running requests, unless the engine is already paused.
        flush_cache: drop KV that was computed with the old weights.
        version: name of the new weights; None for a generated one.
    """

    call: int
    path: str | None
    load_format: str | None
    received: bool
    mode: PauseMode
    flush_cache: bool
    version: str | None


class BeginWeights(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Start an update by `ReceiveWeights`."""

    call: int


class ReceiveWeights(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Read some tensors of the update."""

    call: int
    update_info: dict[str, Any]


class CallFeature(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Call `EngineHook.call` of a feature with a method's name and its arguments. The result is the method's."""

    call: int
    feature: str
    method: str
    args: dict[str, Any]


class Shutdown(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Stop now; running requests are aborted."""


class Phase(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A phase of the start has begun (`seconds` is None), or has ended after `seconds`."""

    name: str
    seconds: float | None = None


class Ready(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The core is ready for requests."""

    info: ModelInfo


class Failed(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The core failed to start."""

    failure: Failure


class Lost(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The core's last message: the device is lost, every request ends with this error, and the process ends."""

    message: str


class RequestRefused(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A request was refused, with the fields of its `InvalidRequestError`."""

    id: str
    message: str
    param: str | None


class Done(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Reply to a command.

    Attributes:
        call: the command's number.
        value: its result, of built-in types.
        failure: None on success.
    """

    call: int
    value: Any = None
    failure: Failure | None = None


class Occupied(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Whether a long command of any front end is not answered yet; sent to all when that changes."""

    by_command: bool


class StepDeltas(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The deltas of this front end's requests; sent after every step, even if empty.

    Attributes:
        stats: sent at intervals, and always when the engine becomes idle.
    """

    deltas: list[TokenDelta]
    stats: EngineStats | None = None


WeightCommand = UpdateWeights | BeginWeights | ReceiveWeights
Command = (
    Reset | Pause | Resume | Sleep | WakeUp | AbortNamed | StartProfile | StopProfile | WeightCommand | CallFeature
)
LONG = (Sleep, WakeUp, StartProfile, StopProfile, UpdateWeights, BeginWeights, ReceiveWeights)
"""Commands during which the core may send nothing for minutes."""
ToCore = Hello | Add | Abort | Command | Shutdown
ToClient = Phase | Ready | Failed | Lost | RequestRefused | Done | Occupied | StepDeltas

encode = msgspec.msgpack.Encoder().encode
decode_to_core = msgspec.msgpack.Decoder(ToCore).decode
decode_to_client = msgspec.msgpack.Decoder(ToClient).decode
