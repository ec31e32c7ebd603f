"""`POST /score` and `POST /rerank`."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from octavo.features.pooling.http.answers import RerankDocument, Reranking, RerankItem
from octavo.features.pooling.http.protocol import PairsBody, RerankBody, ScoreBody
from octavo.features.pooling.http.work import (
    PoolingReply,
    compute,
    in_thread_if_long,
    preparation,
    preparer_of,
    usage_of,
)
from octavo.features.pooling.requests import Pair
from octavo.features.pooling.scoring import ScorePlan, paired, plan_scores
from octavo.server.body import check_count, parse_body
from octavo.server.context import ServerContext
from octavo.server.errors import json_response
from octavo.server.listing import ScoreItem


async def score(ctx: ServerContext, request: Request) -> Response:
    """Score texts: one with each of many, or pair by pair."""
    body = await parse_body(request, ScoreBody, ctx.config.max_body_bytes)
    ctx = await ctx.for_request(request, body.model, body)
    reply = PoolingReply.of(ctx, request, body, "score-")
    (first, second), names = body.sides()
    for texts, name in zip((first, second), names, strict=True):
        check_count(ctx.config.max_inputs, len(texts), name)
    plan = await _plan(ctx, body, reply, paired(first, second, names), names[1])
    found = plan.scores(await compute(ctx, request, plan.requests))
    items = [ScoreItem(index=place, score=value) for place, value in enumerate(found)]
    return json_response(reply.listing(items, plan.requests))


async def rerank(ctx: ServerContext, request: Request) -> Response:
    """Order documents by relevance to a query, best first."""
    body = await parse_body(request, RerankBody, ctx.config.max_body_bytes)
    ctx = await ctx.for_request(request, body.model, body)
    reply = PoolingReply.of(ctx, request, body, "rerank-")
    check_count(ctx.config.max_inputs, len(body.documents), "documents")
    pairs = [(body.query, document) for document in body.documents]
    plan = await _plan(ctx, body, reply, pairs, "documents", body.max_tokens_per_doc)
    found = plan.scores(await compute(ctx, request, plan.requests))
    best = sorted(range(len(found)), key=lambda place: -found[place])[: body.top_n or None]
    shown = body.return_documents is not False
    items = [
        RerankItem(
            index=place,
            relevance_score=found[place],
            document=RerankDocument(body.documents[place]) if shown else UNSET,
        )
        for place in best
    ]
    answer = Reranking(
        id=reply.id, model=reply.model, results=items, usage=usage_of(plan.requests), warnings=reply.warnings
    )
    return json_response(answer)


async def _plan(
    ctx: ServerContext,
    body: PairsBody,
    reply: PoolingReply,
    pairs: Sequence[Pair],
    param: str,
    longest: int | None = None,
) -> ScorePlan:
    """Prepare the requests. `longest`: most tokens to read of each pair's second text; None or 0 for all."""
    prepare = preparation(ctx, body, reply)
    shorten = ctx.frontend.tokenizer.shorten

    def work() -> ScorePlan:
        return plan_scores(
            [(first, shorten(second, longest)) for first, second in pairs] if longest else pairs,
            preparer_of(ctx),
            lambda prompt, params: prepare(prompt, params, param=param),
            activate=body.use_activation,
        )

    return await in_thread_if_long([text for pair in pairs for text in pair], work)
