"""Routes that concern all models: health, metrics, load, requests, and the list of models."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from octavo.pool.metrics import PoolMetrics
from octavo.pool.models import Models, anthropic_card
from octavo.pool.pool import Member, Pool
from octavo.server.anthropic import models as anthropic
from octavo.server.anthropic.errors import speaks_anthropic
from octavo.server.errors import ApiError, json_response
from octavo.server.metrics.metrics import CONTENT_TYPE
from octavo.server.ollama import models as ollama
from octavo.server.timestamp import timestamp
from octavo.version import __version__

if TYPE_CHECKING:
    from octavo.pool.front import FrontContext

Answer = Callable[[Request], Awaitable[Response]]

_MODELS = "/v1/models"


class Overview:
    """The routes."""

    def __init__(self, pool: Pool, models: Models, metrics: PoolMetrics, ctx: FrontContext) -> None:
        self._pool = pool
        self._models = models
        self._metrics = metrics
        self._ctx = ctx
        self._document: bytes | None = None
        self._routes: dict[str, Answer] = {
            "/health": self.health,
            "/live": self.health,
            "/ping": self.health,
            "/ready": self.ready,
            "/load": self.load,
            "/version": self.version,
            "/metrics": self.metrics,
            "/debug/requests": self.requests,
            "/": self.home,
            _MODELS: self.list_models,
            "/api/tags": self.ollama_tags,
            "/api/ps": self.ollama_running,
            "/api/version": self.ollama_version,
        }
        if ctx.config.enable_docs:
            self._routes["/openapi.json"] = self.document

    def find(self, path: str, request: Request) -> tuple[str, Answer] | None:
        """Return the route's template and its handler; None if another part answers. With `?model=`, the page at / is
        that of a model."""
        if request.method != "GET" and not (path == "/ping" and request.method == "POST"):
            return None
        if path == "/" and "model" in request.query_params:
            return None
        if path.startswith(f"{_MODELS}/"):
            return _MODELS + "/{model_id}", self.retrieve_model
        return (path, self._routes[path]) if path in self._routes else None

    async def health(self, request: Request) -> Response:
        """200 while a model can be served, with the state of each; 503 if the last start of every model failed."""
        told = {member.name: _health(member) for member in self._models.members}
        if all(member.failures for member in self._models.members):
            reasons = "; ".join(f"{name}: {one['reason']}" for name, one in told.items())
            return ApiError(503, f"No model can be loaded. {reasons}").response()
        return json_response({"status": "ok", "models": told})

    async def ready(self, request: Request) -> Response:
        """As `health`, and 503 while the server shuts down."""
        if self._ctx.lifecycle.draining:
            return ApiError(503, "The server is shutting down and takes no new requests.").response()
        return await self.health(request)

    async def load(self, request: Request) -> Response:
        """Return the sequences running or waiting in all models, and the requests that wait for a model."""
        said = await asyncio.gather(*(_json(member, "/load") for member in self._models.members))
        loads = sum(int(one["server_load"]) for one in said if one is not None)
        return json_response({"server_load": loads + sum(len(member.seat.waiting) for member in self._models.members)})

    async def version(self, request: Request) -> Response:
        return json_response({"version": __version__})

    async def metrics(self, request: Request) -> Response:
        return Response(await self._metrics.exposition(), headers={"Content-Type": CONTENT_TYPE})

    async def requests(self, request: Request) -> Response:
        """Return the requests of all models, oldest first, and each model's state."""
        members = self._models.members
        said = await asyncio.gather(*(_json(member, "/debug/requests") for member in members))
        known = {member.name: one for member, one in zip(members, said, strict=True) if one is not None}
        found = [{**one, "model": name} for name, told in known.items() for one in told["requests"]]
        states = {
            member.name: _health(member)
            | {"engine": known[member.name]["engine"] if member.name in known else None}
            | {"waiting_for_model": len(member.seat.waiting)}
            for member in members
        }
        return json_response({"models": states, "requests": sorted(found, key=lambda one: -one["age"])})

    async def home(self, request: Request) -> Response:
        """Name the models, and the address of each one's page."""
        root = request.scope.get("root_path", "")
        paths = ["/docs", *self._routes] if self._ctx.config.enable_docs else [*self._routes]
        links = [root + path for path in paths if path != "/"]
        pages = [f"{root}/?model={name}" for name in self._models.own_names]
        told = {"name": "octavo", "version": __version__, "models": self._models.own_names}
        return json_response(told | {"links": links, "pages": pages})

    async def list_models(self, request: Request) -> Response:
        cards = await self._models.cards()
        if speaks_anthropic(request.scope):
            return json_response(anthropic.page([anthropic_card(card) for card in cards]))
        return json_response({"object": "list", "data": cards})

    async def retrieve_model(self, request: Request) -> Response:
        path: str = request.scope["path"].removeprefix(request.scope.get("root_path", ""))
        card = await self._models.card(path.removeprefix(f"{_MODELS}/"))
        return json_response(anthropic_card(card) if speaks_anthropic(request.scope) else card)

    async def ollama_tags(self, request: Request) -> Response:
        """List the models in Ollama's form. Of one that is not loaded, only names are known."""
        cards = await self._models.cards()
        said = await self._ollama("/api/tags", self._models.members)
        known = {one["name"]: one for one in said}
        return json_response({"models": [known.get(card["id"]) or _ollama_card(card) for card in cards]})

    async def ollama_running(self, request: Request) -> Response:
        """List the loaded models in Ollama's form."""
        loaded = [one for one in self._models.members if one.state == "loaded"]
        return json_response({"models": await self._ollama("/api/ps", loaded)})

    async def ollama_version(self, request: Request) -> Response:
        return await ollama.version()

    async def _ollama(self, url: str, members: Sequence[Member]) -> list[dict[str, Any]]:
        said = await asyncio.gather(*(_json(member, url) for member in members))
        return [one for told in said if told is not None for one in told["models"]]

    async def document(self, request: Request) -> Response:
        """Return the description of the routes, which the first model that is loaded writes."""
        for member in self._models.members if self._document is None else ():
            told = await _json(member, "/openapi.json")
            self._document = None if told is None else msgspec.json.encode(told)
        if self._document is None:
            text = "A model's process describes the routes, and none is loaded yet. Send a request first."
            return ApiError(503, text, headers={"Retry-After": "10"}).response()
        return json_response(msgspec.Raw(self._document))


def _ollama_card(card: dict[str, Any]) -> dict[str, Any]:
    digest = hashlib.sha256(f"{card['root']}\n{card['id']}".encode()).hexdigest()
    told = {"name": card["id"], "model": card["id"], "modified_at": timestamp(card["created"])}
    return told | {"size": 0, "digest": digest, "details": {"family": "unknown", "families": ["unknown"]}}


def _health(member: Member) -> dict[str, Any]:
    told: dict[str, Any] = {"state": member.state}
    return told | ({"reason": reason} if (reason := member.trouble or member.reason) else {})


async def _json(member: Member, url: str) -> dict[str, Any] | None:
    """Return a process's JSON; None if it does not answer."""
    answer = await member.told(url)
    found: dict[str, Any] | None = None if answer is None else msgspec.json.decode(answer)
    return found
