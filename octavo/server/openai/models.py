"""`GET /v1/models`."""

from __future__ import annotations

from starlette.responses import Response

from octavo.server.context import ServerContext
from octavo.server.errors import json_response
from octavo.server.openai.responses import ModelCard, ModelList, ModelPermission
from octavo.text.hooks import AddedModel


async def list_models(ctx: ServerContext) -> Response:
    """Return a card for each name of the served model, and for each model that a feature adds."""
    own = [_card(ctx, name) for name in ctx.model_names]
    return json_response(ModelList(data=[*own, *(_added(ctx, one) for one in await ctx.added_models())]))


async def retrieve_model(ctx: ServerContext, name: str) -> Response:
    """Return the card of one name.

    Raises:
        UnknownModelError: no model is served as `name`.
    """
    found = await ctx.find_model(name)
    return json_response(_card(ctx, name) if found is None else _added(ctx, found))


def _added(ctx: ServerContext, model: AddedModel) -> ModelCard:
    return _card(ctx, model.name, root=model.root, parent=model.parent or ctx.model_names[0])


def _card(ctx: ServerContext, name: str, *, root: str | None = None, parent: str | None = None) -> ModelCard:
    info = ctx.frontend.info
    return ModelCard(
        id=name,
        created=ctx.started,
        root=root or info.name,
        parent=parent,
        max_model_len=info.max_model_len,
        tasks=info.tasks,
        permission=[ModelPermission(id=f"modelperm-{name}", created=ctx.started)],
    )
