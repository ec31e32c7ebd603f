"""`POST /v1/load_lora_adapter` and `/v1/unload_lora_adapter`, as vLLM has them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from octavo.core.errors import InvalidRequestError, ModelFileError
from octavo.features.lora.payload import NAME
from octavo.features.lora.requests import LoraInfo
from octavo.server.body import parse_body, require
from octavo.server.context import ServerContext
from octavo.server.errors import ApiError
from octavo.server.schema.document import describe

_FLAG = "--allow-runtime-lora-updating"


class LoadLoraAdapterBody(BaseModel):
    """`POST /v1/load_lora_adapter`. `lora_path` is on the engine's machine.

    With `load_inplace`, an adapter of this name is replaced: its running requests keep the old one, later ones get the
    new one.
    """

    model_config = ConfigDict(strict=True, extra="ignore")

    lora_name: str = ""
    lora_path: str = ""
    load_inplace: bool = False


class UnloadLoraAdapterBody(BaseModel):
    """`POST /v1/unload_lora_adapter`. New requests can't name the adapter any more; running ones are waited for."""

    model_config = ConfigDict(strict=True, extra="ignore")

    lora_name: str = ""
    lora_int_id: int | None = None


BODIES: Sequence[type[BaseModel]] = [LoadLoraAdapterBody, UnloadLoraAdapterBody]


def routes(ctx: ServerContext) -> APIRouter:
    """Return the two routes if the engine serves adapters. They answer 404 unless a flag allows them."""
    router = APIRouter(tags=["models"])
    info = ctx.frontend.info.facts(NAME, LoraInfo)
    if info is None:
        return router

    async def load_lora_adapter(request: Request) -> Response:
        """Load an adapter from the server's files; return once requests can name it."""
        _check_allowed(request, allowed=info.updates)
        body = await parse_body(request, LoadLoraAdapterBody, ctx.config.max_body_bytes)
        given = bool(body.lora_name) and bool(body.lora_path)
        require(given, "lora_name", None, "Both 'lora_name' and 'lora_path' must be provided.")
        text = f"{body.lora_name!r} is a name of the served model; give the adapter another one."
        require(body.lora_name not in ctx.model_names, "lora_name", body.lora_name, text)
        wish = {"name": body.lora_name, "path": body.lora_path, "in_place": body.load_inplace}
        try:
            await ctx.frontend.engine.call(NAME, "load", wish)
        except ModelFileError as error:
            raise InvalidRequestError(str(error), param="lora_path", value=body.lora_path) from None
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")

    async def unload_lora_adapter(request: Request) -> Response:
        """Unload an adapter; return once its last request has ended and its memory is free."""
        _check_allowed(request, allowed=info.updates)
        body = await parse_body(request, UnloadLoraAdapterBody, ctx.config.max_body_bytes)
        text = "'lora_name' needs to be provided to unload a LoRA adapter."
        require(bool(body.lora_name), "lora_name", None, text)
        await ctx.frontend.engine.call(NAME, "unload", {"name": body.lora_name})
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")

    for endpoint, body in ((load_lora_adapter, LoadLoraAdapterBody), (unload_lora_adapter, UnloadLoraAdapterBody)):
        router.add_api_route(f"/v1/{endpoint.__name__}", endpoint, methods=["POST"], openapi_extra=describe(body))
    return router


def limits(ctx: ServerContext) -> Mapping[str, list[dict[str, Any]]]:
    """Return nothing: the bodies' fields have no limits of this server."""
    return {}


def _check_allowed(request: Request, *, allowed: bool) -> None:
    if not allowed:
        text = f"There is no POST {request.url.path} here unless the server is started with {_FLAG}."
        raise ApiError(404, text)
