"""The forms of a prompt: text, token ids or embeddings, bare or in an object."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NotRequired, TypedDict

from octavo.core.errors import InvalidRequestError, UnsupportedError


class TextPrompt(TypedDict):
    """`cache_salt`: the KV cache of this prompt is shared only with requests that have the same salt."""

    prompt: str
    cache_salt: NotRequired[str]


class TokensPrompt(TypedDict):
    """Like `TextPrompt`, for a tokenized prompt. `prompt` is its text, if known."""

    prompt_token_ids: list[int]
    prompt: NotRequired[str]
    cache_salt: NotRequired[str]


class EmbedsPrompt(TypedDict):
    """A prompt of embeddings: a torch tensor [tokens, hidden size], or one of `torch.save` in base64.

    With `prompt_token_ids` and `prompt_is_token_ids`, all of one length, each position uses its token if
    `prompt_is_token_ids` is true there, else its embedding. `prompt` is the text, if known.
    """

    prompt_embeds: Any
    prompt_token_ids: NotRequired[list[int]]
    prompt_is_token_ids: NotRequired[list[bool]]
    prompt: NotRequired[str]
    cache_salt: NotRequired[str]


Prompt = str | list[int] | TextPrompt | TokensPrompt | EmbedsPrompt
_PROMPT_KEYS = {"prompt", "prompt_token_ids", "cache_salt", "type"}


def parts_of(prompt: Prompt, param: str) -> tuple[str | None, list[int] | None, str | None]:
    """Return text, token ids and salt; at least one of the first two is not None."""
    if isinstance(prompt, str):
        return prompt, None, None
    if isinstance(prompt, list):
        return None, prompt, None
    if not isinstance(prompt, Mapping):
        raise InvalidRequestError(
            f"The {param} must be a string, a list of token ids, or an object with 'prompt' or 'prompt_token_ids'; got "
            f"{type(prompt).__name__}.",
            param=param,
            value=prompt,
        )
    odd = next((name for name, value in prompt.items() if name not in _PROMPT_KEYS and value not in (None, {})), None)
    if odd is not None:
        raise UnsupportedError(
            f"A {param} has 'prompt' or 'prompt_token_ids', and perhaps 'cache_salt'; {odd!r} is not supported, leave "
            "it out.",
            param=param,
            value=odd,
        )
    text, tokens, salt = prompt.get("prompt"), prompt.get("prompt_token_ids"), prompt.get("cache_salt")
    if not isinstance(text, str | None) or not isinstance(tokens, list | None) or (text is None and tokens is None):
        raise InvalidRequestError(
            f"The {param} must have 'prompt', a string, or 'prompt_token_ids', a list of integers.",
            param=param,
            value=dict(prompt),
        )
    if salt is not None and (not isinstance(salt, str) or not salt):
        raise InvalidRequestError("cache_salt must be a string that is not empty.", param="cache_salt", value=salt)
    return text, tokens, salt
