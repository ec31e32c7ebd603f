"""`GET /v1/models`."""

from __future__ import annotations

from starlette.responses import Response

from octavo.server.context import ServerContext
from octavo.server.errors import UnknownModelError, json_response
from octavo.server.openai.responses import ModelCard, ModelList, ModelPermission


def list_models(ctx: ServerContext) -> Response:
    """Return a card for each name."""
    return json_response(ModelList(data=[_card(ctx, name) for name in ctx.model_names]))


def retrieve_model(ctx: ServerContext, name: str) -> Response:
    """Return the card of one name.

    Raises:
        UnknownModelError: no model is served as `name`.
    """
    if name not in ctx.model_names:
        raise UnknownModelError(name, ctx.model_names)
    return json_response(_card(ctx, name))


def _card(ctx: ServerContext, name: str) -> ModelCard:
    info = ctx.frontend.info
    return ModelCard(
        id=name,
        created=ctx.started,
        root=info.name,
        max_model_len=info.max_model_len,
        tasks=info.tasks,
        permission=[ModelPermission(id=f"modelperm-{name}", created=ctx.started)],
    )
