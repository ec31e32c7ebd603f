"""`EngineClient`: the interface to an engine core, in this process, in another one, or a fake."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from typing import Any, Protocol

from octavo.core.info import Health, ModelInfo, Received
from octavo.core.output import TokenDelta
from octavo.core.pausing import PauseMode, SleepTag
from octavo.core.request import GenerateRequest
from octavo.core.stats import EngineStats


class EngineClient(Protocol):
    """Token ids in, token ids out; no text, no HTTP."""

    @property
    def info(self) -> ModelInfo: ...

    def generate(self, request: GenerateRequest) -> AsyncIterator[TokenDelta]:
        """Yield the request's deltas, of all its `n` choices interleaved, until every choice has finished.

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
        """Drop past prompts from the KV cache. Running requests keep their blocks, which others may find."""
        ...

    async def pause(self, mode: PauseMode, *, clear_cache: bool = True) -> None:
        """Pause: new requests wait, and running ones are aborted, finished or frozen. Return once that is done.

        May be called during a pause.

        Args:
            clear_cache: drop past prompts from the KV cache; no effect under KEEP.
        """
        ...

    async def resume(self) -> None:
        """End a pause, if any. Raises EngineStateError while the engine sleeps."""
        ...

    async def sleep(self, level: int, mode: PauseMode) -> None:
        """Pause and free memory; see `core/pausing.py`.

        Raises:
            EngineStateError: the engine was not started for sleeping.
        """
        ...

    async def wake_up(self, parts: Iterable[SleepTag]) -> None:
        """Allocate the memory of these parts again; the pause ends once no part sleeps."""
        ...

    async def abort_named(self, names: Iterable[str] | None) -> int:
        """Abort the requests, of any front end, with these names (see `answers_to`), or all; return their number."""
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
        """Replace the weights by those of another checkpoint of the same model, or by received tensors.

        They are read while requests run. The engine is then paused shortly, unless it is paused already, which it then
        stays.

        Args:
            path: a folder or .gguf file on the engine's machine; None for the one that was read last.
            load_format: format of the checkpoint; None to detect it.
            received: use the tensors of `receive_weights` instead.
            mode: what the pause does to running requests.
            flush_cache: drop KV that was computed with the old weights, and recompute paused requests.
            version: name of the new weights; None for a generated one.

        Returns:
            `weight_version` and `num_paused_requests`.

        Raises:
            InvalidRequestError: they can't replace the weights in use, which stay.
            EngineStateError: the weights are asleep, or no tensors were received.
        """
        ...

    async def begin_weights(self) -> None:
        """Start an update by `receive_weights`."""
        ...

    async def receive_weights(self, update_info: Mapping[str, Any]) -> None:
        """Make the engine read tensors: {"path": a safetensors file or a folder on its machine}.

        Raises:
            InvalidRequestError: the path has no tensors.
            EngineStateError: `begin_weights` was not called.
        """
        ...

    async def start_profile(self, prefix: str = "") -> None:
        """Profile steps into a file whose name begins with `prefix`, until `stop_profile` or the profile's limits.

        Raises:
            EngineStateError: the engine was not started for profiles, or a profile is running.
            InvalidRequestError: the prefix can't be part of a file name.
        """
        ...

    async def stop_profile(self) -> str:
        """Stop the profile; return the path of its trace on the engine's machine, or "" if none was running."""
        ...

    async def call(self, feature: str, method: str, args: Mapping[str, Any]) -> Any:
        """Call `EngineHook.call` of a feature; return its result when it is there. All values are of built-in types.

        Raises:
            InvalidRequestError: there is no such feature or method, or it refuses the arguments.
            EngineStateError: it can't be done now.
        """
        ...

    def stats(self) -> EngineStats:
        """Return the newest snapshot, without waiting."""
        ...

    @property
    def replicas(self) -> Sequence[EngineClient]:
        """The replicas in order, which differ in statistics, health and process; the engine itself if it has none."""
        ...

    def health(self) -> Health:
        """Return whether the core is alive and, if it has work, makes progress."""
        ...

    def received(self, request_id: str) -> Received:
        """Return the tokens received for a request of `generate`; 0 tokens for an unknown one."""
        ...

    @property
    def slow_readers(self) -> int:
        """Number of requests that were ended because too much of their output was unread."""
        ...

    async def close(self) -> None: ...
