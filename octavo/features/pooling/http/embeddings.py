"""`POST /v1/embeddings`, `/pooling` and `/classify`."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from typing import cast, get_args

from starlette.requests import Request
from starlette.responses import Response

from octavo.core.errors import InvalidRequestError
from octavo.core.request import GenerateRequest
from octavo.features.pooling.http.answers import ClassItem, EmbeddingItem, PoolingItem
from octavo.features.pooling.http.encode import encode
from octavo.features.pooling.http.protocol import ClassifyBody, EmbeddingBody, PoolingBody
from octavo.features.pooling.http.work import PoolingReply, compute, prepare_inputs, preparer_of, usage_of
from octavo.features.pooling.params import Pooled, Task, pooler_info
from octavo.server.body import parse_body
from octavo.server.context import ServerContext
from octavo.server.errors import json_response

_BYTES = ("bytes", "bytes_only")


async def embeddings(ctx: ServerContext, request: Request) -> Response:
    """Return a vector for each input."""
    body = await parse_body(request, EmbeddingBody, ctx.config.max_body_bytes)
    ctx = await ctx.for_request(request, body.model, body)
    reply = PoolingReply.of(ctx, request, body, "embd-")
    params = preparer_of(ctx).params("embed", dimensions=body.dimensions, normalize=_normalize(body))
    jobs = await prepare_inputs(ctx, body, reply, params)
    results = await compute(ctx, request, jobs)
    if body.encoding_format in _BYTES:
        return _bytes_response(body, reply, jobs, results)
    as_text = body.encoding_format == "base64"
    items = [
        EmbeddingItem(index=place, embedding=_base64(pooled, body) if as_text else pooled.values())
        for place, pooled in enumerate(results)
    ]
    return json_response(reply.listing(items, jobs))


async def pooling(ctx: ServerContext, request: Request) -> Response:
    """Return the task's result for each input."""
    body = await parse_body(request, PoolingBody, ctx.config.max_body_bytes)
    ctx = await ctx.for_request(request, body.model, body)
    reply = PoolingReply.of(ctx, request, body, "pooling-")
    task = _task(ctx, body.task)
    params = preparer_of(ctx).params(task, dimensions=body.dimensions, normalize=_normalize(body))
    jobs = await prepare_inputs(ctx, body, reply, params)
    results = await compute(ctx, request, jobs)
    if body.encoding_format in _BYTES:
        return _bytes_response(body, reply, jobs, results)
    items = []
    for place, pooled in enumerate(results):
        if body.encoding_format == "base64":
            items.append(PoolingItem(index=place, data=_base64(pooled, body)))
        else:
            items.append(PoolingItem(index=place, data=pooled.rows() if task == "token_embed" else pooled.values()))
    return json_response(reply.listing(items, jobs))


async def classify(ctx: ServerContext, request: Request) -> Response:
    """Return the label of each input."""
    body = await parse_body(request, ClassifyBody, ctx.config.max_body_bytes)
    ctx = await ctx.for_request(request, body.model, body)
    reply = PoolingReply.of(ctx, request, body, "classify-")
    params = preparer_of(ctx).params("classify", normalize=body.use_activation)
    jobs = await prepare_inputs(ctx, body, reply, params)
    results = await compute(ctx, request, jobs)
    pooler = pooler_info(ctx.frontend.info)
    labels = pooler.labels if pooler else []
    items = []
    for place, pooled in enumerate(results):
        probs = pooled.values()
        best = max(range(len(probs)), key=probs.__getitem__)
        items.append(ClassItem(index=place, label=labels[best], probs=probs, num_classes=len(probs)))
    return json_response(reply.listing(items, jobs))


def _normalize(body: EmbeddingBody) -> bool | None:
    if body.normalize is not None and body.use_activation not in (None, body.normalize):
        raise InvalidRequestError(
            "normalize and use_activation are the same and contradict each other; leave one out.",
            param="use_activation",
            value=body.use_activation,
        )
    return body.use_activation if body.normalize is None else body.normalize


def _task(ctx: ServerContext, given: str | None) -> Task:
    """Return the requested task; by default the model's main task."""
    if given is not None and given not in get_args(Task):
        raise InvalidRequestError(
            f"Unsupported task: {given!r}. Choose one of {', '.join(get_args(Task))}.", param="task", value=given
        )
    pooler = pooler_info(ctx.frontend.info)
    return cast("Task", given or (pooler.task if pooler else "embed"))


def _bytes(pooled: Pooled, body: EmbeddingBody) -> bytes:
    return encode(pooled, body.embed_dtype or "float32", body.endianness or "native")


def _base64(pooled: Pooled, body: EmbeddingBody) -> str:
    return base64.b64encode(_bytes(pooled, body)).decode("ascii")


def _bytes_response(
    body: EmbeddingBody, reply: PoolingReply, jobs: Sequence[GenerateRequest], results: Sequence[Pooled]
) -> Response:
    """Concatenate the vectors; a header gives the range of each, unless only the bytes are requested."""
    parts = [_bytes(pooled, body) for pooled in results]
    headers = {}
    if body.encoding_format == "bytes":
        items, start = [], 0
        for place, (pooled, part) in enumerate(zip(results, parts, strict=True)):
            form = {"embed_dtype": body.embed_dtype or "float32", "endianness": body.endianness or "native"}
            items.append({"index": place, **form, "start": start, "end": start + len(part), "shape": pooled.shape})
            start += len(part)
        usage = usage_of(jobs)
        told = {
            "id": reply.id,
            "created": reply.created,
            "model": reply.model,
            "data": items,
            "usage": {"prompt_tokens": usage.prompt_tokens, "total_tokens": usage.total_tokens},
        }
        headers["metadata"] = json.dumps(told)
    return Response(b"".join(parts), media_type="application/octet-stream", headers=headers)
