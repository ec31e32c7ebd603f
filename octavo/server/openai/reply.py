"""Common data of all parts of one answer."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, TypeVar

from msgspec import UNSET, UnsetType
from starlette.requests import Request

from octavo.server.context import ServerContext, answer_id
from octavo.server.openai.generation import UsageCounter
from octavo.server.openai.protocol import GenerationBody
from octavo.server.openai.responses import ChatChunk, Completion, Usage

StreamChunk = TypeVar("StreamChunk", ChatChunk, Completion)


@dataclass(slots=True, frozen=True, kw_only=True)
class Reply:
    """Identity and options of one answer.

    Attributes:
        warnings, fingerprint: sent once, in the whole answer or in a stream's last chunk.
        include_usage: a stream ends with a chunk with usage; all others have `usage: null`.
        continuous_usage: every chunk has the usage so far; needs include_usage.
        return_token_ids: choices include their token ids.
        return_prompt_text: the answer includes the rendered prompt.
    """

    id: str
    created: int
    model: str
    warnings: list[str] | UnsetType
    fingerprint: str | None
    include_usage: bool
    continuous_usage: bool
    return_token_ids: bool
    return_prompt_text: bool

    @classmethod
    def of(cls, ctx: ServerContext, request: Request, body: GenerationBody, prefix: str, warnings: list[str]) -> Reply:
        """Create the reply. `ctx` is the one for the body's model."""
        options = body.stream_options
        forced = ctx.config.enable_force_include_usage
        include_usage = forced or bool(options and options.include_usage)
        return cls(
            id=answer_id(request, body.request_id, prefix),
            created=int(time.time()),
            model=ctx.model,
            warnings=warnings or UNSET,
            fingerprint=ctx.fingerprint,
            include_usage=include_usage,
            continuous_usage=forced or (include_usage and bool(options and options.continuous_usage_stats)),
            return_token_ids=bool(body.return_token_ids) or getattr(body, "detokenize", None) is False,
            return_prompt_text=bool(getattr(body, "return_prompt_text", None)),
        )

    def chunk_usage(self, counter: UsageCounter) -> Usage | UnsetType | None:
        """Return `usage` for a chunk with choices."""
        if self.continuous_usage:
            return counter.usage()
        return None if self.include_usage else UNSET

    def chunk(self, kind: type[StreamChunk], counter: UsageCounter, choices: list[Any], *, ends: bool) -> StreamChunk:
        """Return a chunk of a stream; without choices it is the one with usage.

        Args:
            ends: it is the last one.
        """
        return kind(
            id=self.id,
            created=self.created,
            model=self.model,
            choices=choices,
            usage=self.chunk_usage(counter) if choices else counter.usage(),
            system_fingerprint=self.fingerprint or UNSET if ends else UNSET,
            metrics=counter.timings(streamed=True) if ends else UNSET,
            warnings=self.warnings if ends else UNSET,
        )

    def ends(self, *, last: bool) -> bool:
        """Return whether the last chunk with choices is the last chunk of the stream."""
        return last and not self.include_usage
