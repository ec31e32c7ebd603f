"""`NoTokenizer`: the placeholder of a tokenizer for engines with token ids only."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import tokenizers

from octavo.core.errors import InvalidRequestError, UnsupportedError
from octavo.core.params import SamplingParams
from octavo.text.tokenizers.tokenizer import Tokenizer

_TEXT_PARAMS = ("stop", "bad_words")


class NoTokenizer(Tokenizer):
    """Raises InvalidRequestError for every conversion between text and tokens.

    Args:
        vocab_size: rows of the model's head.
    """

    present = False

    def __init__(self, vocab_size: int) -> None:
        self.named_tokens: dict[str, str] = {}
        self.chat_templates: dict[str, str] = {}
        self.special_ids: frozenset[int] = frozenset()
        self.vocab_size = vocab_size

    @property
    def backend(self) -> tokenizers.Tokenizer:  # type: ignore[override]  # raises instead of holding one
        raise needs_tokenizer()

    @property
    def max_token_chars(self) -> int:
        return 0

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        raise needs_tokenizer()

    def encode_within(
        self,
        text: str,
        pair: str | None = None,
        *,
        limit: int | None = None,
        side: Literal["left", "right"] = "right",
        add_special_tokens: bool = True,
    ) -> tuple[list[int], list[int]]:
        raise needs_tokenizer()

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        raise needs_tokenizer()

    def token_bytes(self, token: int) -> bytes:
        raise needs_tokenizer()


def needs_tokenizer(param: str | None = None, value: Any = None) -> InvalidRequestError:
    """Return the error for a request that needs a tokenizer. `param`: the field that needs it."""
    what = "text can't be read or written" if param is None else f"{param} is not supported"
    return UnsupportedError(
        f"This engine runs without a tokenizer, so {what}: use token ids for prompts and outputs, or start "
        "it without --skip-tokenizer-init (--tokens-only).",
        param=param,
        value=value,
    )


def without_text(params: SamplingParams, *more: str) -> SamplingParams:
    """Return the parameters of a request whose output is token ids only. `more`: further fields that need text.

    Raises:
        UnsupportedError: a field that needs text is set.
    """
    odd = next((name for name in (*_TEXT_PARAMS, *more) if getattr(params, name) not in (None, [], "")), None)
    if odd is not None:
        raise needs_tokenizer(odd, getattr(params, odd))
    return params.replace(detokenize=False)
