"""`POST /v1/embeddings`, `/pooling` and `/classify`."""

from __future__ import annotations

import base64

from starlette.requests import Request
from starlette.responses import Response

from octavo.core.errors import InvalidRequestError
from octavo.core.pooling import Pooled
from octavo.server.body import parse_body
from octavo.server.context import ServerContext
from octavo.server.errors import json_response
from octavo.server.vectors.answers import (
    Classification,
    ClassItem,
    EmbeddingItem,
    Embeddings,
    PoolingItem,
    PoolingResult,
)
from octavo.server.vectors.protocol import ClassifyBody, EmbeddingBody, PoolingBody
from octavo.server.vectors.work import Reply, compute, prepare_inputs, usage_of


async def embeddings(ctx: ServerContext, request: Request) -> Response:
    """A vector of each input."""
    body = await parse_body(request, EmbeddingBody, ctx.config.max_body_bytes)
    reply = Reply.of(ctx, request, body, "embd-")
    params = ctx.frontend.pooling.params("embed", dimensions=body.dimensions, normalize=_normalize(body))
    jobs = await prepare_inputs(ctx, body, reply, body.input, params)
    results = await compute(ctx, request, jobs)
    as_text = body.encoding_format == "base64"
    items = [
        EmbeddingItem(index=place, embedding=_base64(pooled) if as_text else pooled.values())
        for place, pooled in enumerate(results)
    ]
    answer = Embeddings(
        id=reply.id,
        created=reply.created,
        model=reply.model,
        data=items,
        usage=usage_of(jobs),
        warnings=reply.warnings,
    )
    return json_response(answer)


async def pooling(ctx: ServerContext, request: Request) -> Response:
    """What a task makes of each input."""
    body = await parse_body(request, PoolingBody, ctx.config.max_body_bytes)
    reply = Reply.of(ctx, request, body, "pool-")
    task = body.task or "token_embed"
    params = ctx.frontend.pooling.params(task, dimensions=body.dimensions, normalize=_normalize(body))
    jobs = await prepare_inputs(ctx, body, reply, body.input, params)
    results = await compute(ctx, request, jobs)
    items = []
    for place, pooled in enumerate(results):
        if body.encoding_format == "base64":
            items.append(PoolingItem(index=place, data=_base64(pooled)))
        else:
            items.append(PoolingItem(index=place, data=pooled.rows() if task == "token_embed" else pooled.values()))
    answer = PoolingResult(
        id=reply.id,
        created=reply.created,
        model=reply.model,
        data=items,
        usage=usage_of(jobs),
        warnings=reply.warnings,
    )
    return json_response(answer)


async def classify(ctx: ServerContext, request: Request) -> Response:
    """The label of each input."""
    body = await parse_body(request, ClassifyBody, ctx.config.max_body_bytes)
    reply = Reply.of(ctx, request, body, "classify-")
    params = ctx.frontend.pooling.params("classify", normalize=body.use_activation)
    jobs = await prepare_inputs(ctx, body, reply, body.input, params)
    results = await compute(ctx, request, jobs)
    pooler = ctx.frontend.info.pooler
    labels = pooler.labels if pooler else []
    items = []
    for place, pooled in enumerate(results):
        probs = pooled.values()
        best = max(range(len(probs)), key=probs.__getitem__)
        items.append(ClassItem(index=place, label=labels[best], probs=probs, num_classes=len(probs)))
    answer = Classification(
        id=reply.id,
        created=reply.created,
        model=reply.model,
        data=items,
        usage=usage_of(jobs),
        warnings=reply.warnings,
    )
    return json_response(answer)


def _normalize(body: EmbeddingBody) -> bool | None:
    if body.normalize is not None and body.use_activation not in (None, body.normalize):
        raise InvalidRequestError(
            "normalize and use_activation are the same and contradict each other; leave one out.",
            param="use_activation",
            value=body.use_activation,
        )
    return body.use_activation if body.normalize is None else body.normalize


def _base64(pooled: Pooled) -> str:
    return base64.b64encode(pooled.data).decode("ascii")
