"""Optional logging of prompts and outputs; by default no user content is logged."""

from __future__ import annotations

import logging
from typing import Any

from octavo.config import ServerConfig
from octavo.core.output import RequestOutput
from octavo.core.params import OutputKind
from octavo.core.request import GenerateRequest

logger = logging.getLogger("octavo.server.requests")


class Transcripts:
    """The logging enabled in the settings: prompts at level debug, outputs and their pieces at info."""

    def __init__(self, config: ServerConfig) -> None:
        self._prompts = config.enable_log_requests
        self._outputs = config.enable_log_outputs
        self._deltas = config.enable_log_deltas
        self._most = config.max_log_len

    def begin(self, request: GenerateRequest, text: str | None) -> Transcript | None:
        """Log a prompt, with `text` if it was given as text. Return a transcript if outputs are logged."""
        if self._prompts and logger.isEnabledFor(logging.DEBUG):
            prompt, tokens = self.cut(text), self.cut(request.tokens)
            logger.debug("Request %s asks %r, in tokens %s", request.id, prompt, tokens)
        return Transcript(self, request, deltas=self._deltas) if self._outputs else None

    def cut(self, said: Any) -> Any:
        """Truncate a text or tokens to the configured length."""
        return said if said is None else said[: self._most]


class Transcript:
    """One request's output; logged when the request ends, for any reason."""

    __slots__ = ("_deltas", "_finish", "_request", "_texts", "_tokens", "_transcripts")

    def __init__(self, transcripts: Transcripts, request: GenerateRequest, *, deltas: bool) -> None:
        n = request.params.n
        self._transcripts = transcripts
        self._request = request
        self._deltas = deltas and request.params.output_kind is OutputKind.DELTA
        self._texts: list[list[str]] = [[] for _ in range(n)]
        self._tokens: list[list[int]] = [[] for _ in range(n)]
        self._finish = ["abort"] * n

    def add(self, output: RequestOutput) -> None:
        """Add what is new: a DELTA, or the only output."""
        for choice in output.outputs:
            self._texts[choice.index].append(choice.text)
            self._tokens[choice.index] += choice.token_ids
            if choice.finish_reason is not None:
                self._finish[choice.index] = choice.finish_reason
            if self._deltas and choice.text:
                text = self._transcripts.cut(choice.text)
                logger.info("Request %s, choice %d goes on: %r", self._request.id, choice.index, text)

    def end(self) -> None:
        cut = self._transcripts.cut
        for index, finish in enumerate(self._finish):
            text = cut("".join(self._texts[index]))
            logger.info("Request %s, choice %d ended (%s): %r", self._request.id, index, finish, text)
            logger.debug("Request %s, choice %d in tokens %s", self._request.id, index, cut(self._tokens[index]))
