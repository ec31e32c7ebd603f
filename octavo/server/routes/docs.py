"""GET /docs and /redoc: a page that shows the OpenAPI document and sends requests, only to this server."""

from __future__ import annotations

from pathlib import Path

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

_PAGE = Path(__file__).with_name("docs.html").read_bytes()
_HEADERS = {
    # The page's own script may call this server; nothing else is loaded or called, for any document.
    "Content-Security-Policy": "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'",
    "Cache-Control": "no-cache",
}


def docs_routes() -> APIRouter:
    router = APIRouter()

    async def docs(request: Request) -> Response:
        """Return the page, which fetches /openapi.json itself."""
        return Response(_PAGE, media_type="text/html", headers=_HEADERS)

    for path in ("/docs", "/redoc"):
        router.add_api_route(path, docs, methods=["GET"], include_in_schema=False)
    return router
