"""`ServerContext`: the state shared by the routes. One per app, passed to each route; nothing is global."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
from starlette.requests import Request

from octavo.config import ServerConfig
from octavo.core.errors import InvalidRequestError
from octavo.core.request import BACKGROUND, GenerateRequest
from octavo.server.admission import Admission, client_priority
from octavo.server.errors import ApiError, UnknownModelError
from octavo.server.load_header import load_header
from octavo.server.metrics.http import HttpMetrics
from octavo.server.metrics.metrics import Metrics
from octavo.server.metrics.requests import RequestRecord
from octavo.server.process.lifecycle import Lifecycle
from octavo.server.siblings.siblings import SiblingProcesses
from octavo.server.tenants import ApiKeys, Tenants
from octavo.server.transcript import Transcripts
from octavo.text.frontend import Frontend
from octavo.text.hooks import AddedModel


@dataclass(slots=True, kw_only=True)
class ServerContext:
    """The engine's front end, settings, counters and lifecycle of one server."""

    frontend: Frontend
    config: ServerConfig
    metrics: Metrics
    lifecycle: Lifecycle
    admission: Admission
    transcripts: Transcripts
    keys: ApiKeys
    tenants: Tenants
    siblings: SiblingProcesses | None = None
    """The other API processes of the server, if there are several."""
    background: bool = False
    """Requests through this context run in capacity that other requests leave free."""
    model: str
    """The model's name in answers."""
    tenant: str = ""
    """The tenant of all requests through this context; see `Tenants`."""
    options: Mapping[str, msgspec.Raw] = field(default_factory=dict)
    """Features' options of all requests through this context: those of a model that a feature adds."""
    fingerprint: str | None = None
    """`system_fingerprint` of the answers."""
    started: int = field(default_factory=lambda: int(time.time()))

    @property
    def http(self) -> HttpMetrics:
        return self.metrics.http

    def load_header(self, form: str) -> str | None:
        return load_header(form, self.frontend.engine.stats())

    @property
    def model_names(self) -> list[str]:
        """Names of the served model itself; answers to requests without a name carry the first."""
        return self.config.model_names(self.frontend.info.name)

    def priority(self, asked: int | None) -> int:
        """Return the priority of a request that asks for this one.

        Raises:
            InvalidRequestError: it is one of background work.
        """
        return BACKGROUND if self.background else client_priority(asked or 0, "priority")

    async def for_request(self, request: Request, name: str | None, body: Any = None) -> ServerContext:
        """Return the context for a request that generates with this model: `for_model`, and its tenant."""
        tenant = self.tenants.of_body(body, getattr(request.state, "tenant", ""))
        found = await self.for_model(name, body)
        return replace(found, tenant=tenant) if tenant else found

    async def for_model(self, name: str | None, body: Any = None) -> ServerContext:
        """Return the context for requests to this model. A request without a name means the served model.

        Args:
            body: of the request; added models that its other fields name are looked for, too.

        Raises:
            UnknownModelError: `name` is not served, and the settings don't allow other names.
        """
        for hook in self.frontend.preparer.hooks:
            for other in hook.models_in(body):
                await hook.find_model(self.frontend.engine, other)
        if name is None or name == self.model:
            return self
        try:
            found = await self.find_model(name)
        except UnknownModelError:
            if not self.config.skip_model_name_validation:
                raise
            found = None
        return replace(self, model=name or self.model, options={} if found is None else found.options)

    async def find_model(self, name: str) -> AddedModel | None:
        """Return the model of this name that a feature adds; None if it is the served model itself.

        Raises:
            UnknownModelError: no model is served as `name`.
        """
        names = self.model_names
        if name in names:
            return None
        for hook in self.frontend.preparer.hooks:
            if (found := await hook.find_model(self.frontend.engine, name)) is not None:
                return found
        raise UnknownModelError(name, [*names, *(one.name for one in await self.added_models())])

    async def added_models(self) -> list[AddedModel]:
        """Return the models that features add to the served one, as of now."""
        hooks, engine = self.frontend.preparer.hooks, self.frontend.engine
        return [one for hook in hooks for one in await hook.models(engine)]

    @contextmanager
    def in_flight(self, request: GenerateRequest) -> Iterator[RequestRecord]:
        """Admit a request and count it until it ends. Yield its record.

        Raises:
            QueueFullError: a queue limit is reached.
            ApiError: 404, the request's model was removed after `for_model` had found it.
        """
        self.admission.enter(request)
        record = self.metrics.requests.begin(request)
        self.lifecycle.active.add(request.id)
        try:
            yield record
        except InvalidRequestError as exc:
            record.fail(exc)
            if exc.param == "model":
                raise ApiError(404, exc.message, param="model") from None
            raise
        except Exception as exc:
            record.fail(exc)
            raise
        except (asyncio.CancelledError, GeneratorExit):
            record.cut("it was cancelled with its batch" if self.background else "its client left or cancelled it")
            raise
        finally:
            aborter = "the shutdown" if self.lifecycle.draining else "a pause, /abort_requests or new weights"
            record.cut_by_engine(f"aborted for {aborter}")
            self.lifecycle.active.discard(request.id)
            self.admission.leave(request)
            record.end()


def answer_id(request: Request, own: str | None, prefix: str) -> str:
    """Return an answer's id, with the prefix: the client's, from a header or the body, else a new one."""
    known: str = request.state.request_id
    chosen = known if own is None or request.headers.get("x-request-id") == known else own
    return chosen if chosen.startswith(prefix) else prefix + chosen


def engine_id(response_id: str) -> str:
    """Return an id for the engine, unique even if a client uses one request id twice."""
    return f"{response_id}-{secrets.token_hex(6)}"
