"""What is the same in every part of one answer."""

from __future__ import annotations

import time
from dataclasses import dataclass

from msgspec import UNSET, UnsetType
from starlette.requests import Request

from octavo.server.context import ServerContext
from octavo.server.openai.generation import UsageCounter
from octavo.server.openai.protocol import GenerationBody
from octavo.server.openai.responses import Usage


@dataclass(slots=True, frozen=True, kw_only=True)
class Reply:
    """Identity and options of one answer.

    Attributes:
        warnings: told once, in the whole answer or in a stream's last chunk.
        include_usage: a stream ends with a chunk that holds the usage, and the others say `usage: null`.
        continuous_usage: every chunk holds the usage so far; only where it is included at all.
        return_token_ids: choices hold their token ids.
        return_prompt_text: the answer holds what the chat template has made of the messages.
    """

    id: str
    created: int
    model: str
    warnings: list[str] | UnsetType
    include_usage: bool
    continuous_usage: bool
    return_token_ids: bool
    return_prompt_text: bool

    @classmethod
    def of(cls, ctx: ServerContext, request: Request, body: GenerationBody, prefix: str, warnings: list[str]) -> Reply:
        """Checks that the model is served; the id is the client's own, if it gave one."""
        options = body.stream_options
        include_usage = ctx.config.enable_force_include_usage or bool(options and options.include_usage)
        own = body.request_id or request.state.request_id
        return cls(
            id=own if own.startswith(prefix) else prefix + own,
            created=int(time.time()),
            model=ctx.check_model(body.model),
            warnings=warnings or UNSET,
            include_usage=include_usage,
            continuous_usage=include_usage and bool(options and options.continuous_usage_stats),
            return_token_ids=bool(body.return_token_ids) or getattr(body, "detokenize", None) is False,
            return_prompt_text=bool(getattr(body, "return_prompt_text", None)),
        )

    def chunk_usage(self, counter: UsageCounter) -> Usage | UnsetType | None:
        """What a chunk with choices says of usage."""
        if self.continuous_usage:
            return counter.usage()
        return None if self.include_usage else UNSET

    def chunk_warnings(self, *, last: bool) -> list[str] | UnsetType:
        """The warnings, if this chunk with choices is the stream's last chunk of all."""
        return self.warnings if last and not self.include_usage else UNSET
