"""Log-probabilities in the two forms of OpenAI's API."""

from __future__ import annotations

from collections.abc import Sequence

from octavo.core.output import CompletionOutput, Logprob
from octavo.core.params import SamplingParams
from octavo.server.context import ServerContext
from octavo.server.openai.protocol import GenerationBody
from octavo.server.openai.responses import (
    ChatLogprobs,
    CompletionLogprobs,
    PromptLogprob,
    PromptLogprobs,
    TokenLogprob,
    TopLogprob,
)
from octavo.text.tokenizers.tokenizer import Tokenizer

EchoedPrompt = Sequence[tuple[int, dict[int, Logprob] | None]]

_LOWEST = -9999.0
"""Replaces minus infinity, which JSON can't represent."""


def tokens_as_ids(ctx: ServerContext, body: GenerationBody) -> bool:
    """Return whether tokens are written as `token_id:<id>`: as the request sets, else the server."""
    given = body.return_tokens_as_token_ids
    return ctx.config.return_tokens_as_token_ids if given is None else given


class LogprobWriter:
    """Writes the log-probabilities of choices; `as_ids` writes tokens as `token_id:<id>`.

    Args:
        params: determine which candidates are listed with each token.
    """

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams, *, as_ids: bool) -> None:
        self._tokenizer = tokenizer
        named = params.logprob_token_ids
        count = len(named) + 1 if named else params.logprobs or 0  # with the token itself
        self._count = None if count == -1 else count  # -1 requests all
        self._as_ids = as_ids
        self._offsets: dict[int, int] = {}

    def chat(self, choice: CompletionOutput) -> ChatLogprobs | None:
        """Return the form of chat completions for the tokens in `choice`."""
        if choice.logprobs is None:
            return None
        return ChatLogprobs(
            [self._token(token, entries) for token, entries in zip(choice.token_ids, choice.logprobs, strict=True)]
        )

    def completion(self, choice: CompletionOutput, key: int, prompt: EchoedPrompt = ()) -> CompletionLogprobs | None:
        """Return the form of text completions, including an echoed prompt.

        Offsets continue from the last call for `key`.
        """
        if choice.logprobs is None:
            return None
        offset = self._offsets.get(key, 0)
        result = CompletionLogprobs([], [], [], [])
        for token, entries in [*prompt, *zip(choice.token_ids, choice.logprobs, strict=True)]:
            text = self._text(token, None if entries is None else entries[token])
            result.tokens.append(text)
            result.token_logprobs.append(None if entries is None else _finite(entries[token].logprob))
            result.text_offset.append(offset)
            offset += len(text)
            result.top_logprobs.append(None if entries is None else self._told(token, entries))
        self._offsets[key] = offset
        return result

    def prompt(self, found: Sequence[dict[int, Logprob] | None] | None) -> PromptLogprobs | None:
        """Return `prompt_logprobs` of an answer."""
        if found is None:
            return None
        return [
            None
            if entries is None
            else {str(i): PromptLogprob(_finite(e.logprob), e.rank, e.decoded_token) for i, e in entries.items()}
            for entries in found
        ]

    def _token(self, token: int, entries: dict[int, Logprob]) -> TokenLogprob:
        chosen = entries[token]
        top = [TopLogprob(self._text(i, e), _finite(e.logprob), self._bytes(i)) for i, e in self._top(entries)]
        return TokenLogprob(self._text(token, chosen), _finite(chosen.logprob), self._bytes(token), top)

    def _told(self, token: int, entries: dict[int, Logprob]) -> dict[str, float]:
        """Return the chosen token and the most likely ones, which may be one more than requested."""
        top = dict([(token, entries[token]), *self._top(entries)])
        return {self._text(number, entry): _finite(entry.logprob) for number, entry in top.items()}

    def _top(self, entries: dict[int, Logprob]) -> list[tuple[int, Logprob]]:
        return sorted(entries.items(), key=lambda entry: -entry[1].logprob)[: self._count]

    def _text(self, token: int, entry: Logprob | None) -> str:
        if self._as_ids:
            return f"token_id:{token}"
        known = None if entry is None else entry.decoded_token
        return self._tokenizer.token_text(token) if known is None else known

    def _bytes(self, token: int) -> list[int]:
        return list(self._tokenizer.token_bytes(token))


def _finite(value: float) -> float:
    return max(value, _LOWEST)
