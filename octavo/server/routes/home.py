"""GET /: a few lines of HTML, or the same as JSON for those who ask for it."""

from __future__ import annotations

import json
import shlex
from html import escape
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from octavo.server.context import ServerContext
from octavo.server.errors import json_response
from octavo.version import __version__

_PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>Octavo: {model}</title>
<style>
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 46rem; margin: 3rem auto; padding: 0 1rem; color: #222; }}
pre {{ background: #f4f4f4; padding: 1rem; overflow-x: auto; border-radius: 6px; }}
@media (prefers-color-scheme: dark) {{
  body {{ background: #181818; color: #ddd; }} pre {{ background: #262626; }} a {{ color: #8bf; }}
}}
</style>
<h1>Octavo {version}</h1>
<p>Serves <b>{model}</b> with an API that OpenAI's clients understand. Try it:</p>
<pre>{curl}</pre>
<p>In OpenAI's clients the address is <code>base_url="{base}/v1"</code>.</p>
<p>{links}</p>
</html>
"""


def home_page(ctx: ServerContext, request: Request) -> Response:
    """The page, with links that hold behind a proxy too."""
    root = request.scope.get("root_path", "")
    model = ctx.model_names[0]
    generates = "generate" in ctx.frontend.info.tasks
    base = str(request.base_url).rstrip("/")
    by_ids = not ctx.frontend.tokenizer.present
    curl = curl_example(base, model, needs_key=bool(ctx.config.api_keys), generates=generates, by_ids=by_ids)
    paths = ["/v1/models", "/health", "/metrics", "/version"]
    if ctx.config.enable_docs:
        paths = ["/docs", "/openapi.json", *paths]
    if "text/html" not in request.headers.get("accept", ""):
        return json_response(
            {
                "name": "octavo",
                "version": __version__,
                "model": model,
                "links": [root + path for path in paths],
                "try": curl,
            }
        )
    links = " · ".join(f'<a href="{escape(root + path)}">{path}</a>' for path in paths)
    page = _PAGE.format(model=escape(model), version=__version__, curl=escape(curl), base=escape(base), links=links)
    return Response(page, media_type="text/html")


def curl_example(
    base_url: str,
    model: str,
    *,
    needs_key: bool,
    generates: bool = True,
    by_ids: bool = False,
    uds: str | None = None,
) -> str:
    """A command that asks the server something, through the socket file `uds` if that is where it listens.

    `by_ids` is for a server without a tokenizer.
    """
    question = {"role": "user", "content": "What is the capital of France?"}
    # Greedily, for else a small model's first answer may be anything.
    asked: dict[str, Any] = {"messages": [question], "temperature": 0}
    path, asked = ("chat/completions", asked) if generates else ("embeddings", {"input": "The capital of France"})
    if by_ids:
        path, asked = ("completions", {"prompt": [1, 2, 3]}) if generates else ("embeddings", {"input": [1, 2, 3]})
    body = json.dumps({"model": model, **asked})
    key = " -H 'Authorization: Bearer '\"$OCTAVO_API_KEY\"" if needs_key else ""
    socket = f"--unix-socket {shlex.quote(uds)} " if uds else ""
    return f"curl {socket}{base_url}/v1/{path}{key} -H 'Content-Type: application/json' -d {shlex.quote(body)}"
