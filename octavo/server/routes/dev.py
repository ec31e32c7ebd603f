"""Routes for development, available only if the server was started for it."""

from __future__ import annotations

import dataclasses
import os
import platform
from typing import Any

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from octavo.server.body import require
from octavo.server.context import ServerContext
from octavo.server.errors import json_response
from octavo.version import __version__

_SECRETS = ("api_keys", "ssl_keyfile_password")
_SECRET_WORDS = ("KEY", "PASSWORD", "TOKEN")
_FORMATS = ("text", "json")


def dev_routes(ctx: ServerContext) -> APIRouter:
    """POST /reset_prefix_cache, GET /server_info."""
    router = APIRouter(tags=["development"])
    engine = ctx.frontend.engine

    async def reset_prefix_cache(request: Request) -> Response:
        """Drop the KV cache of past prompts; running requests keep theirs."""
        await engine.reset_prefix_cache()
        return Response(status_code=200)

    async def server_info(request: Request) -> Response:
        """Return the server's settings, as text or with `config_format=json` as an object, and the machine."""
        form = request.query_params.get("config_format", "text")
        require(form in _FORMATS, "config_format", form, f"config_format must be one of {', '.join(_FORMATS)}.")
        settings = _settings(ctx)
        return json_response(
            {
                "vllm_config": settings if form == "json" else str(settings),
                "vllm_env": _environment(),
                "weight_version": engine.stats().weight_version,
                "system_env": _system(),
            }
        )

    router.add_api_route("/reset_prefix_cache", reset_prefix_cache, methods=["POST"])
    router.add_api_route("/server_info", server_info, methods=["GET"])
    return router


def _settings(ctx: ServerContext) -> dict[str, Any]:
    server = dataclasses.asdict(ctx.config)
    for name in _SECRETS:
        server[name] = "(hidden)" if server[name] else server[name]
    model = msgspec.msgpack.decode(msgspec.msgpack.encode(ctx.frontend.info))  # features' parts of it are encoded
    return {"server": server, "model": model}


def _environment() -> dict[str, str]:
    return {
        name: value
        for name, value in sorted(os.environ.items())
        if name.startswith(("OCTAVO_", "VLLM_")) and not any(word in name for word in _SECRET_WORDS)
    }


def _system() -> dict[str, Any]:
    return {
        "octavo_version": __version__,
        "python_version": platform.python_version(),
        "os": platform.platform(),
        "cpu_count": os.cpu_count(),
    }
