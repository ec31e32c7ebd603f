"""The routes that answer with vectors, labels and scores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import APIRouter
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from octavo.core.params import Range
from octavo.features.pooling.http import cohere, embeddings, scores
from octavo.features.pooling.http.cohere import EmbedBody
from octavo.features.pooling.http.protocol import ClassifyBody, EmbeddingBody, PoolingBody, RerankBody, ScoreBody
from octavo.features.pooling.params import pooler_info
from octavo.server.context import ServerContext
from octavo.server.routes.invocations import Form
from octavo.server.schema.document import describe
from octavo.server.schema.limits import bounded, prompts

BODIES: Sequence[type[BaseModel]] = [EmbeddingBody, EmbedBody, PoolingBody, ClassifyBody, ScoreBody, RerankBody]

_LABELS: Sequence[Form] = ((("task",), "/pooling"), (("input",), "/classify"), (("messages",), "/classify"))
_VECTORS: Sequence[Form] = (
    (("task",), "/pooling"),
    (("input",), "/v1/embeddings"),
    (("messages",), "/v1/embeddings"),
    (("query", "documents"), "/rerank"),
    (("queries", "documents"), "/score"),
    (("queries", "items"), "/score"),
    (("text_1", "text_2"), "/score"),
    (("data_1", "data_2"), "/score"),
)


def routes(ctx: ServerContext) -> APIRouter:
    """POST /v1/embeddings, /v2/embed, /pooling, /classify, /score and /v1/score, /rerank, /v1/rerank and /v2/rerank."""
    router = APIRouter(tags=["vectors"])

    async def create_embeddings(request: Request) -> Response:
        """Vectors of texts, in the form of OpenAI's API."""
        return await embeddings.embeddings(ctx, request)

    async def create_embed(request: Request) -> Response:
        """Vectors of texts, in the form of Cohere's API."""
        return await cohere.embed(ctx, request)

    async def create_pooling(request: Request) -> Response:
        """Vectors of texts, of their tokens, or labels."""
        return await embeddings.pooling(ctx, request)

    async def create_classification(request: Request) -> Response:
        """Labels of texts."""
        return await embeddings.classify(ctx, request)

    async def create_score(request: Request) -> Response:
        """Similarity scores of pairs of texts."""
        return await scores.score(ctx, request)

    async def create_rerank(request: Request) -> Response:
        """Documents in the order of relevance, in the form of Jina's and Cohere's APIs."""
        return await scores.rerank(ctx, request)

    endpoints = (
        (("/v1/embeddings",), create_embeddings, EmbeddingBody),
        (("/v2/embed",), create_embed, EmbedBody),
        (("/pooling",), create_pooling, PoolingBody),
        (("/classify",), create_classification, ClassifyBody),
        (("/score", "/v1/score"), create_score, ScoreBody),
        (("/rerank", "/v1/rerank", "/v2/rerank"), create_rerank, RerankBody),
    )
    for paths, endpoint, body in endpoints:
        for path in paths:
            name = f"{endpoint.__name__}{path.replace('/', '_')}"
            router.add_api_route(path, endpoint, methods=["POST"], name=name, openapi_extra=describe(body))
    return router


def invocations(ctx: ServerContext) -> Sequence[Form]:
    """The forms of bodies at `/invocations`; a model with labels gives them before vectors."""
    return (*_LABELS, *_VECTORS) if "classify" in ctx.frontend.info.tasks else _VECTORS


def limits(ctx: ServerContext) -> Mapping[str, list[dict[str, Any]]]:
    """The bodies' fields in the OpenAPI document, narrowed as in `server/schema/limits.py`."""
    info = ctx.frontend.info
    inputs = [prompts(info.vocab_size, ctx.config.max_inputs)]
    made = {f"{body.__name__}.input": inputs for body in (EmbeddingBody, PoolingBody, ClassifyBody)}
    pooler = pooler_info(info)
    if pooler is not None:
        sizes: dict[str, Any] = {"enum": [pooler.size, *(pooler.matryoshka or [])]}
        free = pooler.matryoshka == []
        made["dimensions"] = [bounded("integer", Range(1, pooler.size)) | ({} if free else sizes)]
    return made
