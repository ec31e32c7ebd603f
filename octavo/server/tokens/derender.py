"""Answers from tokens of another engine: `/v1/chat/completions/derender` and `/v1/completions/derender`.

The inverse of `/render`: converts the response of `/inference/v1/generate` to the route's own response.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import Response

from octavo.core.errors import InvalidRequestError
from octavo.core.output import CompletionOutput
from octavo.server.body import parse_body, require
from octavo.server.context import ServerContext, engine_id
from octavo.server.errors import json_response
from octavo.server.openai.chat import prepare_chat, said
from octavo.server.openai.fields import Int
from octavo.server.openai.protocol import ChatBody, CompletionBody
from octavo.server.openai.responses import (
    ChatChoice,
    ChatCompletion,
    ChatLogprobs,
    ChatMessage,
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    TokenLogprob,
    TopLogprob,
    Usage,
)
from octavo.server.openai.routing import AccumulatedMessage

_WRITTEN_AS = "token_id:"

_Tokens = Annotated[list[Int], Field(min_length=1)]


class _DerenderModel(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", protected_namespaces=())


class MadeLogprob(_DerenderModel):
    """A candidate, or with `top_logprobs` a generated token; `token` is written as `token_id:7`."""

    token: str
    logprob: float
    top_logprobs: list[MadeLogprob] | None = None


class MadeLogprobs(_DerenderModel):
    """Log-probabilities of all tokens of a choice."""

    content: list[MadeLogprob] | None = None


class MadeChoice(_DerenderModel):
    """Generated tokens of one choice."""

    index: Int
    token_ids: _Tokens
    finish_reason: str | None = None
    stop_reason: Int | str | None = None
    logprobs: MadeLogprobs | None = None


class Made(_DerenderModel):
    """A response of `POST /inference/v1/generate`."""

    request_id: str
    choices: Annotated[list[MadeChoice], Field(min_length=1)]


class DerenderChatBody(_DerenderModel):
    """`POST /v1/chat/completions/derender`. `chat_request` determines how reasoning and calls are parsed."""

    model: str | None = None
    generate_response: Made
    chat_request: ChatBody | None = None
    prompt_tokens: Annotated[Int, Field(ge=0)] | None = None


class DerenderCompletionBody(_DerenderModel):
    """`POST /v1/completions/derender`, with a response for each prompt."""

    model: str | None = None
    generate_responses: Annotated[list[Made], Field(min_length=1)]
    completion_request: CompletionBody | None = None
    prompt_tokens: list[Annotated[Int, Field(ge=0)]] | None = None


async def derender_chat(ctx: ServerContext, request: Request) -> Response:
    """Return the chat completion of given tokens."""
    body = await parse_body(request, DerenderChatBody, ctx.config.max_body_bytes)
    ctx, made = await ctx.for_model(body.model), body.generate_response
    _check(ctx, [made])
    chat = None
    if body.chat_request is not None:
        chat = await prepare_chat(ctx, body.chat_request, engine_id(made.request_id))
    choices = []
    for choice in made.choices:
        skips = chat is None or chat.job.params.skip_special_tokens
        output = _output(ctx, choice, skip_special_tokens=skips)
        finish, turn = output.finish_reason, ChatMessage("assistant", output.text)
        if chat is not None:
            news = chat.choices()[0].take(output)
            message = AccumulatedMessage()
            message.add(news)
            finish, turn = news.finish, said(chat, message)
        found = _logprobs(ctx, choice)
        logprobs = None if found is None else ChatLogprobs(found)
        choices.append(ChatChoice(choice.index, turn, logprobs, finish, choice.stop_reason))
    return json_response(
        ChatCompletion(
            id=made.request_id,
            created=int(time.time()),
            model=ctx.model,
            choices=choices,
            usage=_usage(body.prompt_tokens or 0, [made]),
        )
    )


async def derender_completion(ctx: ServerContext, request: Request) -> Response:
    """Return the text completion of given tokens."""
    body = await parse_body(request, DerenderCompletionBody, ctx.config.max_body_bytes)
    ctx, made = await ctx.for_model(body.model), body.generate_responses
    _check(ctx, made)
    counts = body.prompt_tokens or [0] * len(made)
    text = f"prompt_tokens must have a number for each of the {len(made)} generate_responses, got {len(counts)}."
    require(len(counts) == len(made), "prompt_tokens", counts, text)
    asked = body.completion_request
    skips = asked is None or asked.skip_special_tokens is not False
    choices = [choice for one in made for choice in one.choices]
    return json_response(
        Completion(
            id=made[0].request_id,
            created=int(time.time()),
            model=ctx.model,
            choices=[_text_choice(ctx, index, choice, skips=skips) for index, choice in enumerate(choices)],
            usage=_usage(sum(counts), made),
        )
    )


def _text_choice(ctx: ServerContext, index: int, choice: MadeChoice, *, skips: bool) -> CompletionChoice:
    output, found = _output(ctx, choice, skip_special_tokens=skips), _logprobs(ctx, choice)
    told = None
    if found is not None:
        told = CompletionLogprobs([], [], [], [])
        offset = 0
        for one in found:
            told.tokens.append(one.token)
            told.token_logprobs.append(one.logprob)
            told.top_logprobs.append({top.token: top.logprob for top in one.top_logprobs})
            told.text_offset.append(offset)
            offset += len(one.token)
    return CompletionChoice(index, output.text, told, output.finish_reason, choice.stop_reason)


def _output(ctx: ServerContext, choice: MadeChoice, *, skip_special_tokens: bool) -> CompletionOutput:
    """Return the choice with its text, without the token that ended it."""
    tokens = choice.token_ids
    if choice.finish_reason == "stop" and tokens[-1] in ctx.frontend.info.eos_token_ids:
        tokens = tokens[:-1]
    text = ctx.frontend.tokenizer.decode(tokens, skip_special_tokens=skip_special_tokens)
    return CompletionOutput(choice.index, text, choice.token_ids, finish_reason=choice.finish_reason or "stop")


def _check(ctx: ServerContext, made: Sequence[Made]) -> None:
    """Refuse responses that no engine with this model can produce."""
    vocabulary, longest = ctx.frontend.tokenizer.vocab_size, ctx.frontend.info.max_model_len
    for one in made:
        most = ctx.config.max_n
        require(len(one.choices) <= most, "choices", len(one.choices), f"choices must be at most {most} (--max-n).")
        for choice in one.choices:
            count = len(choice.token_ids)
            text = f"token_ids must be at most {longest}, the context of this model, got {count}."
            require(count <= longest, "token_ids", count, text)
            for token in choice.token_ids:
                text = f"token_ids must be in [0, {vocabulary}), got {token}."
                require(0 <= token < vocabulary, "token_ids", token, text)


def _logprobs(ctx: ServerContext, choice: MadeChoice) -> list[TokenLogprob] | None:
    """Return log-probabilities with tokens as text."""
    if choice.logprobs is None or choice.logprobs.content is None:
        return None
    found = []
    for one in choice.logprobs.content:
        tops = [
            TopLogprob(text, top.logprob, data) for top in one.top_logprobs or () for text, data in [_told(ctx, top)]
        ]
        text, data = _told(ctx, one)
        found.append(TokenLogprob(text, one.logprob, data, tops))
    return found


def _told(ctx: ServerContext, one: MadeLogprob) -> tuple[str, list[int]]:
    """Return text and bytes of a token that is written as its id, or as text already."""
    tokenizer = ctx.frontend.tokenizer
    if not one.token.startswith(_WRITTEN_AS):
        return one.token, list(one.token.encode())
    number = one.token.removeprefix(_WRITTEN_AS)
    token = int(number) if number.isascii() and number.isdigit() and len(number) < 10 else -1
    if not 0 <= token < tokenizer.vocab_size:
        raise InvalidRequestError("There is no such token.", param="logprobs", value=one.token)
    return tokenizer.token_text(token), list(tokenizer.token_bytes(token))


def _usage(prompt: int, made: Sequence[Made]) -> Usage:
    written = sum(len(choice.token_ids) for one in made for choice in one.choices)
    return Usage(prompt, written, prompt + written)
