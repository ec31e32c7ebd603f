"""`/api/tags`, `/api/ps`, `/api/show`, `/api/pull` and `/api/version`: the served model, as Ollama describes models."""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec
from starlette.responses import Response

from octavo.server.context import ServerContext
from octavo.server.errors import ApiError, UnknownModelError, json_response
from octavo.server.ollama.protocol import OllamaModelBody
from octavo.server.timestamp import timestamp
from octavo.text.prompts.infill import infill_of

LEVEL = "0.13.0"
"""The version of Ollama whose fields these routes have. Clients enable what they do by it."""
_LATEST = ":latest"
_NEVER = "9999-12-31T23:59:59Z"


async def served_name(ctx: ServerContext, name: str) -> str:
    """Return the served name that a client means: without the tag `:latest`, unless a name has it.

    Raises:
        UnknownModelError: no model is served under this name.
    """
    try:
        await ctx.for_model(name)
        return name
    except UnknownModelError:
        if not name.endswith(_LATEST):
            raise
    plain = name.removesuffix(_LATEST)
    await ctx.for_model(plain)
    return plain


async def tags(ctx: ServerContext) -> Response:
    """List the served names and adapters."""
    return json_response({"models": [_card(ctx, name) for name in await _names(ctx)]})


async def running(ctx: ServerContext) -> Response:
    """List the same: the server's model is loaded."""
    size = _size(ctx)
    loaded = {
        "expires_at": _NEVER,
        "size_vram": size if ctx.frontend.info.accelerator == "cuda" else 0,
        "context_length": ctx.frontend.info.max_model_len,
    }
    return json_response({"models": [_card(ctx, name) | loaded for name in await _names(ctx)]})


async def show(ctx: ServerContext, body: OllamaModelBody) -> Response:
    """Describe one model.

    Raises:
        UnknownModelError: it is not served.
    """
    await served_name(ctx, _asked(body))
    info, chat = ctx.frontend.info, ctx.frontend.chat
    family = _family(ctx)
    facts = {
        "general.architecture": family,
        "general.basename": info.name,
        f"{family}.context_length": info.max_model_len,
        f"{family}.embedding_length": info.hidden_size,
    }
    defaults = {name: value for name, value in ctx.frontend.default_sampling.items() if isinstance(value, int | float)}
    return json_response(
        {
            "modified_at": timestamp(ctx.started),
            "template": chat.source if chat else "",
            "parameters": "\n".join(f"{name} {value}" for name, value in defaults.items()),
            "details": _details(ctx),
            "model_info": facts,
            "capabilities": _capabilities(ctx),
        }
    )


async def pull(ctx: ServerContext, body: OllamaModelBody) -> Response:
    """Answer that a served model is there. Others can't be loaded by requests.

    Raises:
        ApiError: 404, it is not served.
    """
    name = _asked(body)
    try:
        await served_name(ctx, name)
    except UnknownModelError as exc:
        text = f"{exc.message} The server loads no other models; start one with: octavo serve MODEL"
        raise ApiError(404, text, param="model") from None
    done = msgspec.json.encode({"status": "success"})
    streamed = body.stream is not False
    return Response(done + b"\n" * streamed, media_type="application/x-ndjson" if streamed else "application/json")


async def version() -> Response:
    """Return the version of Ollama's API."""
    return json_response({"version": LEVEL})


def _asked(body: OllamaModelBody) -> str:
    name = body.model or body.name
    if not name:
        raise ApiError(400, "model is required: the name of a model.", param="model")
    return name


async def _names(ctx: ServerContext) -> list[str]:
    return [*ctx.model_names, *(one.name for one in await ctx.added_models())]


def _card(ctx: ServerContext, name: str) -> dict[str, Any]:
    return {
        "name": name,
        "model": name,
        "modified_at": timestamp(ctx.started),
        "size": _size(ctx),
        "digest": hashlib.sha256(f"{ctx.frontend.info.name}\n{name}".encode()).hexdigest(),
        "details": _details(ctx),
    }


def _details(ctx: ServerContext) -> dict[str, Any]:
    family = _family(ctx)
    return {
        "parent_model": "",
        "format": "",
        "family": family,
        "families": [family],
        "parameter_size": "",
        "quantization_level": ctx.frontend.info.weights,
    }


def _family(ctx: ServerContext) -> str:
    return ctx.frontend.info.architecture.partition("For")[0].lower() or "unknown"


def _size(ctx: ServerContext) -> int:
    return ctx.frontend.info.memory.get("weights", 0)


def _capabilities(ctx: ServerContext) -> list[str]:
    frontend = ctx.frontend
    generates, text = "generate" in frontend.info.tasks, frontend.tokenizer.present
    found = {
        "completion": generates,
        "tools": generates and frontend.chat is not None and frontend.answers.template_tools,
        "thinking": generates and frontend.answers.reasoning is not None,
        "insert": generates and text and infill_of(frontend.tokenizer) is not None,
        "vision": any("image" in hook.attached for hook in frontend.preparer.hooks),
        "embedding": "embed" in frontend.info.tasks,
    }
    return [name for name, there in found.items() if there]
