"""The feature's routes: those of audio."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import APIRouter
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from octavo.features.media.payload import NAME, MediaInfo
from octavo.features.media.transcription.form import schema
from octavo.features.media.transcription.route import transcribe
from octavo.features.media.transcription.styles import TRANSCRIBE, TRANSLATE
from octavo.server.context import ServerContext
from octavo.server.schema.document import STREAM

BODIES: Sequence[type[BaseModel]] = []


def routes(ctx: ServerContext) -> APIRouter:
    """Return the routes of transcription if the model reads audio."""
    router = APIRouter(tags=["audio"])
    info = ctx.frontend.info.facts(NAME, MediaInfo)
    if info is None or info.modality != "audio" or info.refused:
        return router

    async def transcriptions(request: Request) -> Response:
        """Return what is said in a file."""
        return await transcribe(ctx, info, request, TRANSCRIBE)

    async def translations(request: Request) -> Response:
        """Return in English what is said in a file."""
        return await transcribe(ctx, info, request, TRANSLATE)

    form = {"requestBody": {"required": True, "content": {"multipart/form-data": {"schema": schema()}}}}
    for endpoint in (transcriptions, translations):
        router.add_api_route(f"/v1/audio/{endpoint.__name__}", endpoint, methods=["POST"], openapi_extra=form | STREAM)
    return router


def limits(ctx: ServerContext) -> Mapping[str, list[dict[str, Any]]]:
    """Return nothing: forms have no limits of this server."""
    return {}
