"""GET /: a chat page for browsers, or the addresses of all routes as JSON for programs."""

from __future__ import annotations

import base64
import hashlib
import json
import shlex
from html import escape
from pathlib import Path
from string import Template
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from octavo.server.context import ServerContext
from octavo.server.errors import json_response
from octavo.text.frontend import Frontend
from octavo.version import __version__


def _part(name: str) -> str:
    return Path(__file__).with_name(name).read_text(encoding="utf-8")


def _source(text: str) -> str:
    """Return the Content-Security-Policy source of an inline script or style."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


_PAGE = Template(_part("home.html"))
_STYLE = _part("home.css")
_SCRIPT = _part("home_stream.js") + _part("home.js")
_POLICY = (
    # Only this script and style run, not text inserted into the page; they can reach only this server.
    f"default-src 'none'; script-src {_source(_SCRIPT)}; style-src {_source(_STYLE)}; "
    "connect-src 'self'; base-uri 'self'; form-action 'none'; frame-ancestors 'none'"
)
_FILES = "; img-src data:; media-src data:"
"""Those that users attach."""
_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
    "Vary": "Accept",
}


def home_page(ctx: ServerContext, request: Request) -> Response:
    """Return the page for browsers, unless it is disabled; JSON for other clients. Links work behind a proxy."""
    root = request.scope.get("root_path", "")
    model = ctx.model_names[0]
    base = str(request.base_url).rstrip("/")
    curl = curl_example(base, model, ctx.frontend, needs_key=bool(ctx.config.api_keys))
    paths = ["/v1/models", "/health", "/metrics", "/version"]
    if ctx.config.enable_docs:
        paths = ["/docs", "/openapi.json", *paths]
    if not ctx.config.enable_docs or "text/html" not in request.headers.get("accept", ""):
        links = [root + path for path in paths]
        told = json_response({"name": "octavo", "version": __version__, "model": model, "links": links, "try": curl})
        told.headers["Vary"] = "Accept"
        return told
    refusal = ctx.frontend.why_no_chat()
    attached = next((hook.attached for hook in ctx.frontend.preparer.hooks if hook.attached), "")
    page = _PAGE.substitute(
        # Without a root path, links are relative to the page, which works behind a proxy that moved it.
        root=escape(f"{root}/" if root else "./"),
        model=escape(model),
        version=__version__,
        curl=escape(curl),
        base=escape(base),
        links=" · ".join(f'<a href="{path[1:]}">{path}</a>' for path in paths),
        notice=escape(refusal.message if refusal else ""),
        notice_hidden="" if refusal else "hidden",
        chat="hidden" if refusal else "",
        attach="" if attached else "hidden",
        accept=escape(attached),
        api_open="open" if refusal else "",
        style=_STYLE,
        script=_SCRIPT,
    )
    policy = {"Content-Security-Policy": _POLICY + (_FILES if attached else "")}
    return Response(page, media_type="text/html", headers=_HEADERS | policy)


def curl_example(base_url: str, model: str, frontend: Frontend, *, needs_key: bool, uds: str | None = None) -> str:
    """Return a curl command with a request that the model can answer, through the socket file `uds` if given."""
    generates = "generate" in frontend.info.tasks
    text = frontend.tokenizer.present
    asked: dict[str, Any]
    if not generates:
        path, asked = "embeddings", {"input": "The capital of France" if text else [1, 2, 3]}
    elif frontend.chat is None:
        path, asked = "completions", {"prompt": "The capital of France is" if text else [1, 2, 3]}
    else:
        path, asked = "chat/completions", {"messages": [{"role": "user", "content": "What is the capital of France?"}]}
    if generates:
        # Greedy, because a small model's first sampled answer may be anything.
        asked["temperature"] = 0
    body = json.dumps({"model": model, **asked})
    key = " -H 'Authorization: Bearer '\"$OCTAVO_API_KEY\"" if needs_key else ""
    socket = f"--unix-socket {shlex.quote(uds)} " if uds else ""
    return f"curl {socket}{base_url}/v1/{path}{key} -H 'Content-Type: application/json' -d {shlex.quote(body)}"
