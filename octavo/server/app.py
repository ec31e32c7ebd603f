"""`create_app`: assembles the HTTP application."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from fastapi import APIRouter, FastAPI
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import WebSocketRoute

from octavo.config import ServerConfig
from octavo.features import parts
from octavo.hub.cache import data_dir
from octavo.server import errors
from octavo.server.admission import Admission
from octavo.server.anthropic.protocol import CountBody, MessagesBody
from octavo.server.batch.execute import LineExecutor
from octavo.server.batch.routes import BatchBody, batch_routes
from octavo.server.batch.service import BatchService
from octavo.server.context import ServerContext
from octavo.server.cors import cors_middleware
from octavo.server.door import Door
from octavo.server.error_forms import error_response
from octavo.server.fingerprint import fingerprint
from octavo.server.metrics.metrics import Metrics
from octavo.server.middleware import load_middleware
from octavo.server.ollama.protocol import BODIES as OLLAMA_BODIES
from octavo.server.ollama.route import ollama_routes
from octavo.server.openai.decide.protocol import DecisionBody
from octavo.server.openai.protocol import ChatBatchBody, ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from octavo.server.openai.respond.protocol import ResponseBody
from octavo.server.openai.respond.route import Responses
from octavo.server.process.lifecycle import Lifecycle
from octavo.server.routes.debug import debug_routes
from octavo.server.routes.dev import dev_routes
from octavo.server.routes.docs import docs_routes
from octavo.server.routes.endpoints import post_endpoints
from octavo.server.routes.inference import inference_routes
from octavo.server.routes.invocations import Form, invocation_routes
from octavo.server.routes.pausing import pause_routes, sleep_routes
from octavo.server.routes.profile import profile_routes
from octavo.server.routes.rpc import rpc_routes
from octavo.server.routes.status import metrics_routes, status_routes
from octavo.server.routes.tokens import TOKEN_BODIES, token_routes, tokenizer_routes
from octavo.server.routes.websocket import StreamSocket
from octavo.server.routes.weights import transfer_routes, weight_routes
from octavo.server.schema import document
from octavo.server.schema.limits import limits
from octavo.server.siblings.crew import Crew
from octavo.server.siblings.routes import private_app, relayed
from octavo.server.siblings.siblings import SiblingProcesses
from octavo.server.stream import CLIENT_CLOSED_REQUEST, ClientGoneError
from octavo.server.tenants import ApiKeys, Tenants
from octavo.server.transcript import Transcripts
from octavo.text.frontend import Frontend
from octavo.version import __version__

if TYPE_CHECKING:
    from octavo.server.tracing.traces import Traces

INFERENCE_BODIES: list[type[BaseModel]] = [
    ChatBody,
    ChatBatchBody,
    CompletionBody,
    DecisionBody,
    ResponseBody,
    MessagesBody,
    CountBody,
    TokenizeBody,
    DetokenizeBody,
    *OLLAMA_BODIES,
]


def create_app(
    frontend: Frontend,
    config: ServerConfig | None = None,
    *,
    lifecycle: Lifecycle | None = None,
    siblings: SiblingProcesses | None = None,
    crew: Crew | None = None,
    traces: Traces | None = None,
) -> FastAPI:
    """Return an ASGI application that serves `frontend`. It does not own the engine; the caller closes it.

    Args:
        siblings: the other API processes of the server, if any; `app.state.private` answers them.
        crew: the same processes, for the process that supervises them.
        traces: receives the requests' traces, if enabled; the caller closes it.
    """
    config = config or ServerConfig()
    ctx = make_context(frontend, config, lifecycle, siblings, traces)
    app = FastAPI(
        title="Octavo",
        version=__version__,
        description="Serves a large language model with an API that OpenAI's clients understand.",
        docs_url=None,
        redoc_url=None,
        openapi_url="/openapi.json" if config.enable_docs else None,
        middleware=[
            *reversed(load_middleware(config.middleware)),
            *cors_middleware(config),
            Middleware(Door, ctx=ctx),
            *([Middleware(traces.joining)] if traces else []),
        ],
    )
    batches, responses = _batch_service(ctx, leads=siblings is None or siblings.leads), Responses(ctx)
    app.state.batches, app.state.metrics = batches, ctx.metrics
    in_one_place = [metrics_routes(ctx, crew), batch_routes(config, batches)]
    if siblings is not None:
        app.state.private = private_app(ctx, responses, [*in_one_place, *_private_routes(ctx)])
        if not siblings.leads:
            in_one_place = [relayed(router, siblings) for router in in_one_place]
    inference = [inference_routes(ctx, responses), token_routes(ctx), *_feature_routes(ctx)]
    optional, app.state.behind = _behind_flags(ctx)
    optional += [docs_routes()] if config.enable_docs else []
    for router in (status_routes(ctx), debug_routes(ctx), *inference, *in_one_place, *optional):
        app.include_router(router)
    posts = post_endpoints(*inference)
    app.include_router(ollama_routes(ctx, posts))
    app.include_router(invocation_routes(ctx, posts, partial(_feature_invocations, ctx)))
    app.router.routes.append(WebSocketRoute("/v1/stream", StreamSocket(ctx, posts).__call__))
    own = [module for _, module in parts("http")]
    bodies = [*INFERENCE_BODIES, *TOKEN_BODIES, *(body for module in own for body in module.BODIES), BatchBody]
    bounds = dict(limits(ctx, batches.executor.urls))
    for module in own:
        bounds |= module.limits(ctx)
    document.install(app, bodies, bounds)
    errors.install(app, error_response)
    app.add_exception_handler(ClientGoneError, _gone)
    app.add_exception_handler(ClientDisconnect, _gone)
    return app


def _feature_routes(ctx: ServerContext) -> list[APIRouter]:
    """Return the routes of the features."""
    return [module.routes(ctx) for _, module in parts("http")]


def _private_routes(ctx: ServerContext) -> list[APIRouter]:
    """Return the routes by which features of other API processes ask this one."""
    return [module.private(ctx) for _, module in parts("http") if hasattr(module, "private")]


def _feature_invocations(ctx: ServerContext) -> list[Form]:
    """Return the forms of the bodies that features' routes read."""
    return [form for _, module in parts("http") if hasattr(module, "invocations") for form in module.invocations(ctx)]


def _behind_flags(ctx: ServerContext) -> tuple[list[APIRouter], dict[str, str]]:
    """Return the routes enabled by flags; and for those that are not, path -> flag."""
    dev = (dev_routes, pause_routes, sleep_routes, weight_routes, transfer_routes, rpc_routes)
    found: list[APIRouter] = []
    missing: dict[str, str] = {}
    for given, flag, makers in (
        (ctx.config.enable_tokenizer_info_endpoint, "--enable-tokenizer-info-endpoint", (tokenizer_routes,)),
        (bool(ctx.frontend.info.profile_dir), "--profiler-config", (profile_routes,)),
        (ctx.config.server_dev_mode, "--server-dev-mode", dev),
    ):
        routers = [make(ctx) for make in makers]
        if given:
            found += routers
        else:
            paths = [route.path for router in routers for route in router.routes if isinstance(route, APIRoute)]
            missing |= dict.fromkeys(paths, flag)
    return found, missing


def make_context(
    frontend: Frontend,
    config: ServerConfig,
    lifecycle: Lifecycle | None = None,
    siblings: SiblingProcesses | None = None,
    traces: Traces | None = None,
) -> ServerContext:
    """Return the state shared by the routes. Parts that are not given are created."""
    name = config.model_names(frontend.info.name)[0]
    running = lifecycle or Lifecycle()
    metrics = Metrics(
        frontend.engine,
        name,
        log_requests=config.enable_log_requests,
        tracing=traces,
        draining=lambda: running.draining,
    )
    keys = ApiKeys(config.api_keys)
    return ServerContext(
        frontend=frontend,
        config=config,
        metrics=metrics,
        lifecycle=running,
        admission=Admission(
            config.max_num_queued_reqs,
            config.max_num_queued_tokens,
            config.max_tenant_requests,
            seats=frontend.info.max_num_seqs,
            stats=frontend.engine.stats,
            refused=metrics.requests.refused,
            board=running.board,
        ),
        transcripts=Transcripts(config),
        keys=keys,
        tenants=Tenants(config.tenant_by, keys),
        siblings=siblings,
        fingerprint=fingerprint(config, frontend.info),
        model=name,
    )


def background_executor(ctx: ServerContext) -> LineExecutor:
    """Return an executor that runs batch lines through the routes at background priority."""
    quiet = replace(ctx, background=True)
    return LineExecutor(post_endpoints(inference_routes(quiet), *_feature_routes(quiet)))


def _batch_service(ctx: ServerContext, *, leads: bool) -> BatchService:
    config = ctx.config
    service = BatchService(
        Path(config.jobs_dir).expanduser() if config.jobs_dir else data_dir() / "jobs",
        background_executor(ctx),
        concurrency=config.batch_concurrency or ctx.frontend.info.max_num_seqs,
        max_lines=config.max_batch_lines,
        max_line_bytes=config.max_body_bytes,
    )
    if leads:
        ctx.metrics.batches = service
    return service


async def _gone(request: Request, exc: Exception) -> Response:
    """Set the status in the metrics; the client has disconnected."""
    return Response(status_code=CLIENT_CLOSED_REQUEST)
