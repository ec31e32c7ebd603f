"""What the floors above ask of an engine core, wherever it runs: in this process, in another, or nowhere (a fake)."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol

from octavo.core.info import Health, ModelInfo
from octavo.core.output import TokenDelta
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

    def stats(self) -> EngineStats:
        """The newest snapshot; costs nothing."""
        ...

    def health(self) -> Health:
        """Whether the core lives and, if it has work, makes progress."""
        ...

    @property
    def slow_readers(self) -> int:
        """Requests that were ended because too much of their output waited to be read."""
        ...

    async def close(self) -> None: ...
