"""`GET /v1/models` in the form of Anthropic's API.

Reference: https://docs.anthropic.com/en/api/models-list
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from starlette.responses import Response

from octavo.server.context import ServerContext
from octavo.server.errors import json_response
from octavo.server.timestamp import timestamp


async def list_models(ctx: ServerContext) -> Response:
    """Return all model names on one page."""
    names = [*ctx.model_names, *(one.name for one in await ctx.added_models())]
    return json_response(page([_card(ctx, name) for name in names]))


async def retrieve_model(ctx: ServerContext, name: str) -> Response:
    """Return the card of one model.

    Raises:
        UnknownModelError: no model is served as `name`.
    """
    await ctx.for_model(name)
    return json_response(_card(ctx, name))


def page(cards: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return all cards on one page."""
    return {"has_more": False, "first_id": cards[0]["id"], "last_id": cards[-1]["id"], "data": list(cards)}


def card(name: str, created: float, window: int | None) -> dict[str, Any]:
    """Return the card of a model.

    Args:
        created: seconds since 1970.
        window: tokens of its context; None if unknown.
    """
    return {
        "type": "model",
        "id": name,
        "display_name": name,
        "created_at": timestamp(created),
        "max_input_tokens": window,
        "max_tokens": window,
    }


def _card(ctx: ServerContext, name: str) -> dict[str, Any]:
    return card(name, ctx.started, ctx.frontend.info.max_model_len)
