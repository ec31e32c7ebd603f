"""`GET /tokenizer_info`."""

from __future__ import annotations

from typing import Any

from starlette.responses import Response

from octavo.server.context import ServerContext
from octavo.server.errors import json_response


def tokenizer_info(ctx: ServerContext) -> Response:
    """Return the fields of a tokenizer_config.json: special tokens, added tokens, the chat template."""
    tokenizer = ctx.frontend.tokenizer
    added = tokenizer.backend.get_added_tokens_decoder()
    told: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": ctx.frontend.info.max_model_len,
        "vocab_size": tokenizer.vocab_size,
        **tokenizer.named_tokens,
        "additional_special_tokens": [
            token.content
            for token in added.values()
            if token.special and token.content not in tokenizer.named_tokens.values()
        ],
        "added_tokens_decoder": {
            str(number): {
                name: getattr(token, name)
                for name in ("content", "lstrip", "normalized", "rstrip", "single_word", "special")
            }
            for number, token in sorted(added.items())
        },
    }
    chat = ctx.frontend.chat
    return json_response(told | ({} if chat is None else {"chat_template": chat.source}))
