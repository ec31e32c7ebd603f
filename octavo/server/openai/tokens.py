"""`POST /tokenize` and `POST /detokenize`."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from octavo.server.body import parse_body, require
from octavo.server.context import ServerContext
from octavo.server.errors import json_response
from octavo.server.openai.messages import render
from octavo.server.openai.protocol import DetokenizeBody, TokenizeBody
from octavo.server.openai.responses import Detokenized, Tokenized
from octavo.server.openai.tools import declared_tools
from octavo.text.aside import aside


async def tokenize(ctx: ServerContext, request: Request) -> Response:
    """Return the tokens of `prompt`, or of the prompt rendered from `messages`."""
    body = await parse_body(request, TokenizeBody, ctx.config.max_body_bytes)
    ctx = await ctx.for_model(body.model)
    given = (body.prompt is None) + (body.messages is None) == 1
    require(given, "prompt", body.prompt, "Exactly one of prompt and messages is required.")
    special = body.add_special_tokens
    if body.prompt is not None:
        text = body.prompt
        special = special is not False
    else:
        assert body.messages is not None
        text = await render(
            ctx,
            body.messages,
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
            options=ctx.config.default_chat_template_kwargs | (body.chat_template_kwargs or {}),
            tools=declared_tools(body.tools or []),
        )
    tokenizer = ctx.frontend.tokenizer
    tokens = await aside(len(text), lambda: tokenizer.encode(text, add_special_tokens=bool(special)))
    named = tokenizer.backend.id_to_token
    strings = [named(token) or "" for token in tokens] if body.return_token_strs else None
    return json_response(Tokenized(len(tokens), ctx.frontend.info.max_model_len, tokens, strings))


async def detokenize(ctx: ServerContext, request: Request) -> Response:
    """Return the text of `tokens`, including special ones."""
    body = await parse_body(request, DetokenizeBody, ctx.config.max_body_bytes)
    ctx = await ctx.for_model(body.model)
    tokenizer = ctx.frontend.tokenizer
    for token in body.tokens:
        in_range = 0 <= token < tokenizer.vocab_size
        require(in_range, "tokens", token, f"tokens must be in [0, {tokenizer.vocab_size}), got {token}.")
    return json_response(Detokenized(tokenizer.decode(body.tokens, skip_special_tokens=False)))
