"""Routes to update the served model's weights: from files, or tensor by tensor as trainers send them."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from octavo.core.errors import UnsupportedError
from octavo.core.pausing import PauseMode
from octavo.server.body import decode_json, read_body, require
from octavo.server.context import ServerContext
from octavo.server.errors import json_response

_KINDS = {str: "a string", bool: "true or false", dict: "an object"}


def weight_routes(ctx: ServerContext) -> APIRouter:
    """POST /update_weights_from_disk; GET /weight_info, /get_world_size."""
    router = APIRouter(tags=["development"])
    engine = ctx.frontend.engine

    async def update_weights_from_disk(request: Request) -> Response:
        """Switch to the weights in `model_path`, of the same model. They are read while requests run."""
        body = await _body(request, ctx)
        path = _field(body, "model_path", str)
        require(bool(path), "model_path", path, "model_path is required: a folder or .gguf file on this machine.")
        done = await engine.update_weights(
            path,
            _field(body, "load_format", str),
            mode=PauseMode.ABORT if _field(body, "abort_all_requests", bool) else PauseMode.KEEP,
            flush_cache=_field(body, "flush_cache", bool) is not False,
            version=_field(body, "weight_version", str),
        )
        return json_response({"success": True, "message": "Succeeded to update model weights.", **done})

    async def weight_info(request: Request) -> Response:
        """Return the name of the current weights."""
        return json_response({"weight_version": engine.stats().weight_version})

    async def get_world_size(request: Request) -> Response:
        """Return the number of devices that the model uses."""
        return json_response({"world_size": 1})

    router.add_api_route("/update_weights_from_disk", update_weights_from_disk, methods=["POST"])
    router.add_api_route("/weight_info", weight_info, methods=["GET"])
    router.add_api_route("/get_world_size", get_world_size, methods=["GET"])
    return router


def transfer_routes(ctx: ServerContext) -> APIRouter:
    """POST /init_weight_transfer_engine, /start_weight_update, /update_weights, /finish_weight_update."""
    router = APIRouter(tags=["development"])
    engine = ctx.frontend.engine

    async def init_weight_transfer_engine(request: Request) -> Response:
        """Select how tensors are sent: by files, for which nothing need be known."""
        info = _required(await _body(request, ctx), "init_info")
        if info:
            raise UnsupportedError(
                f"init_info has {', '.join(sorted(info))}, but this server reads weights only from files: "
                "send an empty init_info, and paths to /update_weights.",
                param="init_info",
            )
        return json_response({"message": "Weight transfer initialized"})

    async def start_weight_update(request: Request) -> Response:
        """Begin a weight update."""
        await engine.begin_weights()
        return json_response({"message": "Weight update started"})

    async def update_weights(request: Request) -> Response:
        """Read some tensors: those of the safetensors file or folder `path` in `update_info`."""
        await engine.receive_weights(_required(await _body(request, ctx), "update_info"))
        return json_response({"message": "Weights updated"})

    async def finish_weight_update(request: Request) -> Response:
        """Switch to the sent tensors, which must be all of the model's."""
        body = await _body(request, ctx)
        done = await engine.update_weights(
            received=True,
            flush_cache=_field(body, "flush_cache", bool) is not False,
            version=_field(body, "weight_version", str),
        )
        return json_response({"message": "Weight update finished", **done})

    router.add_api_route("/init_weight_transfer_engine", init_weight_transfer_engine, methods=["POST"])
    router.add_api_route("/start_weight_update", start_weight_update, methods=["POST"])
    router.add_api_route("/update_weights", update_weights, methods=["POST"])
    router.add_api_route("/finish_weight_update", finish_weight_update, methods=["POST"])
    return router


async def _body(request: Request, ctx: ServerContext) -> dict[str, Any]:
    """Return the fields of an optional body."""
    data = await read_body(request, ctx.config.max_body_bytes)
    return decode_json(data) if data.strip() else {}


def _required(body: dict[str, Any], name: str) -> dict[str, Any]:
    found = _field(body, name, dict)
    require(found is not None, name, None, f"{name} is required; add it to the request.")
    return dict(found or {})


def _field(body: dict[str, Any], name: str, kind: type) -> Any:
    """Return a field, None if it is missing."""
    value = body.get(name)
    require(value is None or type(value) is kind, name, value, f"{name} must be {_KINDS[kind]}.")
    return value
