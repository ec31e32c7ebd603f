"""The routes that answer with vectors, labels and scores."""

from __future__ import annotations

from fastapi import APIRouter
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from octavo.server.context import ServerContext
from octavo.server.schema.document import describe
from octavo.server.vectors import cohere, embeddings, scores
from octavo.server.vectors.cohere import EmbedBody
from octavo.server.vectors.protocol import ClassifyBody, EmbeddingBody, PoolingBody, RerankBody, ScoreBody

BODIES: list[type[BaseModel]] = [EmbeddingBody, EmbedBody, PoolingBody, ClassifyBody, ScoreBody, RerankBody]


def vector_routes(ctx: ServerContext) -> APIRouter:
    """POST /v1/embeddings, /v2/embed, /pooling, /classify, /score and /v1/score, /rerank, /v1/rerank and /v2/rerank."""
    router = APIRouter(tags=["vectors"])

    async def create_embeddings(request: Request) -> Response:
        """Vectors of texts, as OpenAI's API has it."""
        return await embeddings.embeddings(ctx, request)

    async def create_embed(request: Request) -> Response:
        """Vectors of texts, as Cohere's API has it."""
        return await cohere.embed(ctx, request)

    async def create_pooling(request: Request) -> Response:
        """Vectors of texts, of their tokens, or labels."""
        return await embeddings.pooling(ctx, request)

    async def create_classification(request: Request) -> Response:
        """Labels of texts."""
        return await embeddings.classify(ctx, request)

    async def create_score(request: Request) -> Response:
        """How well texts go together."""
        return await scores.score(ctx, request)

    async def create_rerank(request: Request) -> Response:
        """Documents in the order of their relevance, as Jina's and Cohere's APIs have it."""
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
