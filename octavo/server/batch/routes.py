"""`/v1/files` and `/v1/batches` of OpenAI's API."""

from __future__ import annotations

import asyncio
import re
import shutil
from pathlib import Path
from typing import IO, Annotated

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import FileResponse, Response

from octavo.config import ServerConfig
from octavo.server.batch.files import FileObject, new_file_id
from octavo.server.batch.service import BatchService
from octavo.server.batch.upload import Upload, read_upload
from octavo.server.body import parse_body, require
from octavo.server.errors import ApiError, json_response
from octavo.server.openai.fields import Int
from octavo.server.page import ascends, page
from octavo.server.schema.document import describe

_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_WINDOW = re.compile(r"([1-9]\d{0,6})([smhd])")
_MAX_WINDOW_S = 30 * 86400
_MIN_LIFETIME_S, _MAX_LIFETIME_S = 3600, 30 * 86400
_FILES_PAGE, _BATCHES_PAGE = 10_000, 100


class Lifetime(BaseModel):
    """Expiry of a file."""

    model_config = ConfigDict(strict=True, extra="forbid")

    anchor: Annotated[str, Field(json_schema_extra={"enum": ["created_at"]})]
    seconds: Annotated[Int, Field(json_schema_extra={"minimum": _MIN_LIFETIME_S, "maximum": _MAX_LIFETIME_S})]


class BatchBody(BaseModel):
    """`POST /v1/batches`."""

    model_config = ConfigDict(strict=True, extra="forbid")

    input_file_id: Annotated[str, Field(min_length=1, max_length=128)]
    endpoint: str
    completion_window: Annotated[str, Field(json_schema_extra={"pattern": f"^{_WINDOW.pattern}$"})]
    metadata: Annotated[dict[str, str], Field(max_length=16)] | None = None
    output_expires_after: Lifetime | None = None


class BatchRoutes:
    """The endpoints."""

    def __init__(self, config: ServerConfig, service: BatchService) -> None:
        self._config = config
        self._service = service

    async def upload_file(self, request: Request) -> Response:
        """Upload a file: a form with `file`, `purpose` and optionally `expires_after`."""
        files = await self._service.files()
        upload = await read_upload(request, self._config.max_file_bytes)
        with upload.content:
            _check_purpose(upload)
            lifetime = _upload_lifetime(upload)
            file_id = new_file_id()
            draft = files.draft(file_id)
            try:
                await asyncio.to_thread(_copy, upload.content, draft)
                facts = await self._service.durably(
                    lambda: files.put(file_id, filename=upload.name, purpose="batch", lifetime_s=lifetime)
                )
            finally:
                draft.unlink(missing_ok=True)
        return json_response(facts)

    async def list_files(self, request: Request) -> Response:
        """List the files."""
        found = (await self._service.files()).list()
        purpose = request.query_params.get("purpose")
        if purpose is not None:
            found = [facts for facts in found if facts.purpose == purpose]
        if ascends(request):
            found.reverse()
        return page(request, [(facts.id, facts) for facts in found], _FILES_PAGE, _FILES_PAGE)

    async def retrieve_file(self, request: Request) -> Response:
        """Return a file's metadata."""
        return json_response((await self._service.files()).get(request.path_params["file_id"]))

    async def file_content(self, request: Request) -> Response:
        """Return a file's content."""
        files = await self._service.files()
        facts: FileObject = files.get(request.path_params["file_id"])
        return FileResponse(files.content(facts.id), media_type="application/octet-stream", filename=facts.filename)

    async def delete_file(self, request: Request) -> Response:
        """Delete a file."""
        file_id = request.path_params["file_id"]
        await self._service.delete_file(file_id)
        return json_response({"id": file_id, "object": "file", "deleted": True})

    async def create_batch(self, request: Request) -> Response:
        """Run every line of an uploaded file as a request, in the background."""
        body = await parse_body(request, BatchBody, self._config.max_body_bytes)
        urls = self._service.executor.urls
        wanted = f"endpoint must be one of {', '.join(urls)}; got {body.endpoint!r}."
        require(body.endpoint in urls, "endpoint", body.endpoint, wanted)
        kept = body.output_expires_after
        batch = await self._service.create(
            body.input_file_id,
            body.endpoint,
            body.completion_window,
            _window_s(body.completion_window),
            metadata=body.metadata,
            output_lifetime_s=_lifetime(kept.anchor, kept.seconds, "output_expires_after") if kept else None,
        )
        return json_response(batch.told())

    async def list_batches(self, request: Request) -> Response:
        """List the batches, newest first."""
        found = await self._service.list()
        return page(request, [(batch.id, batch.told()) for batch in found], 20, _BATCHES_PAGE)

    async def retrieve_batch(self, request: Request) -> Response:
        """Return a batch's state."""
        return json_response((await self._service.get(request.path_params["batch_id"])).told())

    async def cancel_batch(self, request: Request) -> Response:
        """Cancel a batch; the answers computed so far become its output."""
        return json_response((await self._service.cancel(request.path_params["batch_id"])).told())


def batch_routes(config: ServerConfig, service: BatchService) -> APIRouter:
    """Return the routes below /v1/files and /v1/batches."""
    router = APIRouter(tags=["batches"])
    routes = BatchRoutes(config, service)
    form = {
        "type": "object",
        "properties": {
            "file": {"type": "string", "format": "binary"},
            "purpose": {"type": "string", "enum": ["batch"]},
        },
        "required": ["file", "purpose"],
    }
    upload = {"requestBody": {"required": True, "content": {"multipart/form-data": {"schema": form}}}}
    router.add_api_route("/v1/files", routes.upload_file, methods=["POST"], openapi_extra=upload)
    router.add_api_route("/v1/files", routes.list_files, methods=["GET"])
    router.add_api_route("/v1/files/{file_id}", routes.retrieve_file, methods=["GET"])
    router.add_api_route("/v1/files/{file_id}", routes.delete_file, methods=["DELETE"])
    router.add_api_route("/v1/files/{file_id}/content", routes.file_content, methods=["GET"])
    router.add_api_route("/v1/batches", routes.create_batch, methods=["POST"], openapi_extra=describe(BatchBody))
    router.add_api_route("/v1/batches", routes.list_batches, methods=["GET"])
    router.add_api_route("/v1/batches/{batch_id}", routes.retrieve_batch, methods=["GET"])
    router.add_api_route("/v1/batches/{batch_id}/cancel", routes.cancel_batch, methods=["POST"])
    return router


def _copy(content: IO[bytes], path: Path) -> None:
    try:
        with path.open("wb") as file:
            shutil.copyfileobj(content, file, 1 << 20)
    except OSError as exc:
        raise ApiError(507, f"The file can't be stored: {exc.strerror or exc}. Free space on the disk.") from exc


def _check_purpose(upload: Upload) -> None:
    purpose = upload.fields.get("purpose")
    require(purpose is not None, "purpose", None, "purpose is required; add it to the form.")
    text = f"purpose must be batch, the only one that this server supports; got {purpose!r}."
    require(purpose == "batch", "purpose", purpose, text)


def _upload_lifetime(upload: Upload) -> int | None:
    seconds = upload.fields.get("expires_after[seconds]")
    if seconds is None:
        return None
    field = "expires_after[seconds]"
    require(seconds.isdecimal() and len(seconds) < 10, field, seconds, "expires_after[seconds] must be a whole number.")
    return _lifetime(upload.fields.get("expires_after[anchor]", "created_at"), int(seconds), "expires_after")


def _lifetime(anchor: str, seconds: int, param: str) -> int:
    require(anchor == "created_at", param, anchor, f"{param}: anchor must be created_at, got {anchor!r}.")
    low, high = _MIN_LIFETIME_S, _MAX_LIFETIME_S
    require(low <= seconds <= high, param, seconds, f"{param}: seconds must be from {low} to {high}, got {seconds}.")
    return seconds


def _window_s(window: str) -> int:
    match = _WINDOW.fullmatch(window)
    seconds = int(match[1]) * _SECONDS[match[2]] if match else 0
    text = f"completion_window must be a time of up to 30d, such as 24h, 90m or 7d; got {window!r}."
    require(0 < seconds <= _MAX_WINDOW_S, "completion_window", window, text)
    return seconds
