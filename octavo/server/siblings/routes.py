"""Routes between API processes, and those forwarded to the first process."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from http import HTTPStatus

from fastapi import APIRouter, FastAPI
from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response

from octavo.server import errors
from octavo.server.context import ServerContext
from octavo.server.error_forms import error_response
from octavo.server.metrics.merge import encode
from octavo.server.openai.respond.route import KEPT, RECALLED, RECALLED_ITEMS, Responses
from octavo.server.routes.inference import kept_responses
from octavo.server.siblings.crew import OWN_METRICS
from octavo.server.siblings.siblings import SiblingProcesses


def private_app(ctx: ServerContext, responses: Responses, routers: Sequence[APIRouter]) -> FastAPI:
    """Serve the other processes, which have already authenticated and counted the requests."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)

    async def unexpected(request: Request, exc: Exception) -> Response:
        return errors.as_api_error(exc, request.state.request_id).response()

    async def own_metrics(request: Request) -> Response:
        return Response(encode(ctx.metrics.own()))

    async def kept(request: Request) -> Response:
        has = responses.keeps(request.path_params["response_id"])
        return Response(status_code=HTTPStatus.OK if has else HTTPStatus.NOT_FOUND)

    async def recalled(request: Request) -> Response:
        return responses.recalled(request.path_params["response_id"])

    app.add_api_route(OWN_METRICS, own_metrics, methods=["GET"])

    async def recalled_item(request: Request) -> Response:
        return responses.recalled_item(request.path_params["item_id"])

    app.add_api_route(KEPT + "/{response_id}", kept, methods=["GET"])
    app.add_api_route(RECALLED + "/{response_id}", recalled, methods=["GET"])
    app.add_api_route(RECALLED_ITEMS + "/{item_id}", recalled_item, methods=["GET"])
    for router in (kept_responses(responses, None), *routers):
        app.include_router(router)
    errors.install(app, error_response)
    app.add_exception_handler(Exception, unexpected)
    return app


def relayed(router: APIRouter, siblings: SiblingProcesses) -> APIRouter:
    """Return the same routes, forwarded to the first process."""
    relaying = APIRouter(tags=router.tags)
    for route in router.routes:
        assert isinstance(route, APIRoute)
        relaying.add_api_route(
            route.path,
            _relay(siblings),
            methods=sorted(route.methods or ()),
            name=route.name,
            description=route.description,
            openapi_extra=route.openapi_extra,
        )
    return relaying


def _relay(siblings: SiblingProcesses) -> Callable[[Request], Awaitable[Response]]:
    async def relay(request: Request) -> Response:
        return siblings.relayed(request)

    return relay
