"""What the floors above ask of an engine core, wherever it runs: in this process, in another, or nowhere (a fake)."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping
from typing import Any, Protocol

from octavo.core.info import Health, ModelInfo, Received
from octavo.core.output import TokenDelta
from octavo.core.pausing import Part, PauseMode
from octavo.core.request import GenerateRequest
from octavo.core.stats import EngineStats


class EngineClient(Protocol):
    """Token ids in, token ids out; no text, no HTTP."""

    @property
    def info(self) -> ModelInfo: ...

    def generate(self, request: GenerateRequest) -> AsyncIterator[TokenDelta]:
        """The request's news, of all its `n` choices interleaved, until every choice has finished.

        Closing the iterator early (or cancelling the task that reads it) aborts the request within one step.

        Raises:
            InvalidRequestError: the request can never fit; the message gives the numbers.
            EngineDeadError: the core has stopped.
        """
        ...

    async def abort(self, request_id: str, index: int | None = None) -> None:
        """End a request, or one of its choices, now. Its iterator yields a last delta with finish ABORT."""
        ...

    async def reset_prefix_cache(self) -> None:
        """Forget what the KV cache holds of past prompts. Requests that run keep theirs, which others may find."""
        ...

    async def pause(self, mode: PauseMode, *, clear_cache: bool = True) -> None:
        """Let requests that come from now on wait. Returns when the mode has been done to those there are, and the KV
        cache of past prompts is forgotten, unless the mode is to keep them. A pause may follow another."""
        ...

    async def resume(self) -> None:
        """End a pause, if there is one. Raises EngineStateError while the engine sleeps."""
        ...

    async def sleep(self, level: int, mode: PauseMode) -> None:
        """Pause and give memory back; see `core/pausing.py`.

        Raises:
            EngineStateError: the engine was not started for it.
        """
        ...

    async def wake_up(self, parts: Iterable[Part]) -> None:
        """Take the memory of these parts again; once nothing sleeps any more, the pause ends."""
        ...

    async def abort_named(self, names: Iterable[str] | None) -> int:
        """End the requests, of any front end, that answer to these names, or all if None; how many there were."""
        ...

    async def update_weights(
        self,
        path: str | None = None,
        load_format: str | None = None,
        *,
        received: bool = False,
        mode: PauseMode = PauseMode.KEEP,
        flush_cache: bool = True,
        version: str | None = None,
    ) -> dict[str, Any]:
        """Compute with the weights of another checkpoint of the same model, or with what `receive_weights` brought.

        They are read while requests run. Then these stand still for a moment as a pause of this mode has it, unless
        there is a pause, which goes on.

        Args:
            path: a folder or .gguf file on the engine's machine; None for the one that was read last.
            flush_cache: forget what was computed with the old weights, so that what stands still is computed again.
            version: what they are called.

        Returns:
            `weight_version` and `num_paused_requests`.

        Raises:
            InvalidRequestError: they can't take the place of those in use, which stay.
            EngineStateError: those are asleep, or no tensors were received.
        """
        ...

    async def begin_weights(self) -> None:
        """Expect `receive_weights`."""
        ...

    async def receive_weights(self, update_info: Mapping[str, Any]) -> None:
        """Have the engine read some tensors: {"path": a safetensors file or a folder on its machine}.

        Raises:
            InvalidRequestError: there are none.
            EngineStateError: it does not expect any.
        """
        ...

    async def start_profile(self, prefix: str = "") -> None:
        """Note what each step does, in a file whose name begins with `prefix`, until `stop_profile` or its bounds.

        Raises:
            EngineStateError: the engine was not started for it, or a profile is being made.
            InvalidRequestError: no file's name can begin so.
        """
        ...

    async def stop_profile(self) -> str:
        """End the profile; the path of its trace on the engine's machine, or nothing if there was none."""
        ...

    def stats(self) -> EngineStats:
        """The newest snapshot; costs nothing."""
        ...

    def health(self) -> Health:
        """Whether the core lives and, if it has work, makes progress."""
        ...

    def received(self, request_id: str) -> Received:
        """What has come for a request that is being read from `generate`; nothing for any other."""
        ...

    @property
    def slow_readers(self) -> int:
        """Requests that were ended because too much of their output waited to be read."""
        ...

    async def close(self) -> None: ...
