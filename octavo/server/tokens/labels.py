"""`POST /generative_scoring`: the probability that a generative model continues with one of several tokens."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Annotated, Any

from msgspec import UNSET
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema
from starlette.requests import Request
from starlette.responses import Response

from octavo.core.errors import InvalidRequestError
from octavo.core.output import RequestOutput
from octavo.core.params import MAX_LOGPROB_TOKENS
from octavo.server.body import check_count, parse_body, require
from octavo.server.context import ServerContext, engine_id
from octavo.server.errors import json_response
from octavo.server.extras import check_undeclared
from octavo.server.listing import Listing, ScoreItem
from octavo.server.openai.fields import Int, Items, RequestId
from octavo.server.openai.generation import GenerationJob, UsageCounter, collect
from octavo.server.openai.next_token import asking_for, logprobs_of, shares_of
from octavo.server.stream import until_disconnect

_FIELD = "logprob_token_ids"
"""The sampler's name for the labels."""


def _query(value: Any) -> str | list[int]:
    if isinstance(value, str) or (isinstance(value, list) and all(type(one) is int for one in value)):
        return value
    raise InvalidRequestError("query must be a string or a list of token ids.")


_TOKENS = {"type": "array", "items": {"type": "integer"}}
Query = Annotated[str | list[int], BeforeValidator(_query), WithJsonSchema({"anyOf": [{"type": "string"}, _TOKENS]})]


class LabelsBody(BaseModel):
    """A `query` and each of the `items` become a prompt; the score is that of the first of `label_token_ids`.

    With `apply_softmax` (the default) it is its probability among these tokens, else among all.
    """

    model_config = ConfigDict(strict=True, extra="allow", protected_namespaces=())

    query: Query
    items: Items
    label_token_ids: Annotated[list[Int], Field(min_length=1)]
    apply_softmax: bool | None = None
    item_first: bool | None = None
    add_special_tokens: bool | None = None
    model: str | None = None
    priority: Int | None = None
    request_id: RequestId | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=1024)] | None = None


async def generative_scoring(ctx: ServerContext, request: Request) -> Response:
    """Score each item by the probability of the token that follows it."""
    body = await parse_body(request, LabelsBody, ctx.config.max_body_bytes)
    ctx = await ctx.for_request(request, body.model, body)
    warnings = check_undeclared(body, strict=ctx.config.strict_params)
    name = body.request_id or request.state.request_id
    jobs = await _prepare(ctx, body, name)
    outputs = await until_disconnect(request.receive, collect(ctx, jobs))
    counter = UsageCounter(ctx, jobs)
    for number, output in enumerate(outputs):
        counter.add(number, output)
    softmax = body.apply_softmax is not False
    scores = [
        ScoreItem(index=number, score=_score(output, body.label_token_ids, softmax=softmax))
        for number, output in enumerate(outputs)
    ]
    answer = Listing(
        id=f"generative-scoring-{name}",
        created=int(time.time()),
        model=ctx.model,
        data=scores,
        usage=counter.usage(),
        warnings=warnings or UNSET,
    )
    return json_response(answer)


async def _prepare(ctx: ServerContext, body: LabelsBody, name: str) -> list[GenerationJob]:
    check_count(ctx.config.max_inputs, len(body.items), "items")
    labels = list(dict.fromkeys(body.label_token_ids))
    text = f"label_token_ids must have at most {MAX_LOGPROB_TOKENS} tokens, got {len(labels)}."
    require(len(labels) <= MAX_LOGPROB_TOKENS, "label_token_ids", len(labels), text)
    params = asking_for(labels)
    query = _tokens(ctx, body.query, special=body.add_special_tokens is not False)
    jobs = []
    for number, item in enumerate(body.items):
        tokens = _tokens(ctx, item, special=False)
        try:
            made = await ctx.frontend.prepare_async(
                tokens + query if body.item_first else query + tokens,
                params,
                request_id=engine_id(name),
                priority=ctx.priority(body.priority),
                tenant=ctx.tenant,
                namespace=body.cache_salt or "",
                param="items",
                options=ctx.options,
            )
        except InvalidRequestError as exc:
            where = {"items": f"items.{number}", _FIELD: "label_token_ids"}.get(exc.param or "", exc.param)
            message = exc.message.replace(_FIELD, "label_token_ids")
            raise InvalidRequestError(message, param=where, value=exc.value) from None
        jobs.append(GenerationJob(made, None, params))
    return jobs


def _tokens(ctx: ServerContext, part: str | list[int], *, special: bool) -> list[int]:
    return ctx.frontend.tokenizer.encode(part, add_special_tokens=special) if isinstance(part, str) else part


def _score(output: RequestOutput, labels: Sequence[int], *, softmax: bool) -> float:
    logprobs = logprobs_of(output, list(dict.fromkeys(labels)))
    return shares_of(logprobs)[0] if softmax else math.exp(logprobs[0])
