"""`ServerContext`: the state shared by the routes. One per app, passed to each route; nothing is global."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from starlette.requests import Request

from octavo.config import ServerConfig
from octavo.core.request import GenerateRequest
from octavo.server.admission import Admission
from octavo.server.errors import UnknownModelError
from octavo.server.metrics.metrics import Metrics
from octavo.server.metrics.requests import RequestRecord
from octavo.server.process.lifecycle import Lifecycle
from octavo.server.siblings.siblings import SiblingProcesses
from octavo.server.transcript import Transcripts
from octavo.text.frontend import Frontend


@dataclass(slots=True, kw_only=True)
class ServerContext:
    """The engine's front end, settings, counters and lifecycle of one server."""

    frontend: Frontend
    config: ServerConfig
    metrics: Metrics
    lifecycle: Lifecycle
    admission: Admission
    transcripts: Transcripts
    siblings: SiblingProcesses | None = None
    """The other API processes of the server, if there are several."""
    background: bool = False
    """Requests through this context run in capacity that other requests leave free."""
    fingerprint: str | None = None
    """`system_fingerprint` of the answers."""
    started: int = field(default_factory=lambda: int(time.time()))

    @property
    def model_names(self) -> list[str]:
        """Names under which clients may request the model; answers carry the first."""
        return self.config.model_names(self.frontend.info.name)

    def check_model(self, name: str | None) -> str:
        """Return the name for the answer. A request without a name means the served model.

        Raises:
            UnknownModelError: `name` is not served, and the settings don't allow other names.
        """
        names = self.model_names
        if name is not None and name not in names and not self.config.skip_model_name_validation:
            raise UnknownModelError(name, names)
        return name or names[0]

    @contextmanager
    def in_flight(self, request: GenerateRequest) -> Iterator[RequestRecord]:
        """Admit a request and count it until it ends. Yield its record.

        Raises:
            QueueFullError: a queue limit is reached.
        """
        self.admission.enter(request)
        record = self.metrics.requests.begin(request)
        self.lifecycle.active.add(request.id)
        try:
            yield record
        finally:
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
