"""`GET /v1/models` in the form of Anthropic's API.

Reference: https://docs.anthropic.com/en/api/models-list
"""

from __future__ import annotations

import datetime
from typing import Any

from starlette.responses import Response

from octavo.server.context import ServerContext
from octavo.server.errors import json_response


async def list_models(ctx: ServerContext) -> Response:
    """Return all model names on one page."""
    names = [*ctx.model_names, *(one.name for one in await ctx.added_models())]
    page = {"has_more": False, "first_id": names[0], "last_id": names[-1]}
    return json_response({"data": [_card(ctx, name) for name in names], **page})


async def retrieve_model(ctx: ServerContext, name: str) -> Response:
    """Return the card of one model.

    Raises:
        UnknownModelError: no model is served as `name`.
    """
    await ctx.for_model(name)
    return json_response(_card(ctx, name))


def _card(ctx: ServerContext, name: str) -> dict[str, Any]:
    created = datetime.datetime.fromtimestamp(ctx.started, datetime.UTC)
    window = ctx.frontend.info.max_model_len
    return {
        "type": "model",
        "id": name,
        "display_name": name,
        "created_at": created.isoformat().replace("+00:00", "Z"),
        "max_input_tokens": window,
        "max_tokens": window,
    }
