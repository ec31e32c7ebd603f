"""`POST /v2/embed`: embeddings in the form of Cohere's API (https://docs.cohere.com/reference/embed)."""

from __future__ import annotations

import base64
from typing import Annotated, Any, Literal

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from octavo.core.errors import UnsupportedError
from octavo.features.pooling.http.encode import encode, signs
from octavo.features.pooling.http.protocol import InputBody, VectorBody
from octavo.features.pooling.http.work import PoolingReply, compute, prepare_inputs, preparer_of, usage_of
from octavo.features.pooling.params import Pooled
from octavo.server.body import parse_body
from octavo.server.context import ServerContext
from octavo.server.errors import json_response
from octavo.server.openai.fields import Int

_SIDES: dict[str, Literal["left", "right"]] = {"START": "left", "END": "right"}
_TYPES = ("search_document", "search_query", "classification", "clustering")


class EmbedBody(VectorBody):
    """`POST /v2/embed`. `input_type` has no effect: a text's vector does not depend on its use."""

    texts: Annotated[list[str], Field(min_length=1)]
    embedding_types: Annotated[list[Literal["float", "base64", "binary", "ubinary"]], Field(min_length=1)] | None = None
    input_type: str | None = None
    output_dimension: Int | None = None
    truncate: Literal["NONE", "START", "END"] | None = None
    max_tokens: Int | None = None


async def embed(ctx: ServerContext, request: Request) -> Response:
    """Return a vector for each text, in each requested format."""
    body = await parse_body(request, EmbedBody, ctx.config.max_body_bytes)
    ctx = await ctx.for_request(request, body.model, body)
    reply = PoolingReply.of(ctx, request, body, "embd-")
    if body.input_type not in (None, *_TYPES):
        raise UnsupportedError(
            f"Unsupported input_type: {body.input_type!r}. Leave it out, or choose one of {', '.join(_TYPES)}.",
            param="input_type",
            value=body.input_type,
        )
    side = _SIDES.get(body.truncate or "END")
    given = body.model_dump(include=set(VectorBody.model_fields), exclude={"truncate_prompt_tokens", "truncation_side"})
    inputs = InputBody(
        **given,
        input=body.texts,
        truncate_prompt_tokens=None if side is None else body.max_tokens or -1,
        truncation_side=side,
    )
    params = preparer_of(ctx).params("embed", dimensions=body.output_dimension)
    jobs = await prepare_inputs(ctx, inputs, reply, params)
    results = await compute(ctx, request, jobs)
    tokens = usage_of(jobs).prompt_tokens
    answer: dict[str, Any] = {
        "id": reply.id,
        "response_type": "embeddings_by_type",
        "embeddings": {
            form: [_written(pooled, form) for pooled in results]
            for form in dict.fromkeys(body.embedding_types or ["float"])
        },
        "texts": body.texts,
        "meta": {
            "api_version": {"version": "2"},
            "billed_units": {"input_tokens": tokens, "image_tokens": 0},
            "tokens": {"input_tokens": tokens},
        },
    }
    return json_response(answer | ({"warnings": reply.warnings} if reply.warnings else {}))


def _written(pooled: Pooled, form: str) -> list[float] | list[int] | str:
    """Return a vector as numbers, as base64, or as sign bits, eight to a byte, highest bit first."""
    if form == "float":
        return pooled.values()
    if form == "base64":
        return base64.b64encode(encode(pooled, "float32", "little")).decode("ascii")
    return [byte if form == "ubinary" else byte - 128 for byte in signs(pooled)]
