"""`octavo why`: asks a server for the timeline of a request, or for those that wait or were slow."""

from __future__ import annotations

import json
import os
from typing import Any
from urllib.parse import quote

from octavo.cli.flags.parser import OctavoParser
from octavo.core.errors import ConfigError, OctavoError

_DEFAULT_URL = "http://127.0.0.1:8000"
_TIMEOUT_S = 30.0


def run(argv: list[str]) -> int:
    args = make_parser().parse_args(argv)
    for name in ("unfinished", "slowest", "decisions"):
        if args.request is not None and getattr(args, name) is not None:
            raise ConfigError(f"--{name} is for a list of requests; leave it out, or leave out {args.request}.")
    found = fetched(args.url or _DEFAULT_URL, path_of(args), args.api_key)
    print(json.dumps(found, indent=2) if args.json else "\n".join(found["text"]))
    return 0


def make_parser() -> OctavoParser:
    parser = OctavoParser(
        "octavo why",
        words="[ID]",
        description="Say why a request takes or took so long: what it waited for, which part of its prompt was cached "
        "and why the rest was not, when and for whom it was preempted, how it was decoded, and how it ended. "
        "Without ID: the unfinished requests, the oldest first, and the slowest of the recent ones.",
    )
    parser.add_argument("request", metavar="ID", nargs="?", help="the id of an answer, or of a list without ID")
    parser.add_argument("--url", help=f"server to ask (default: {_DEFAULT_URL})")
    parser.add_argument("--model", metavar="NAME", help="which model of a server of several")
    parser.add_argument("--api-key", metavar="KEY", help="key for the server (default: $OCTAVO_API_KEY)")
    parser.add_argument("--json", action="store_true", help="print the server's answer, with all numbers")
    parser.add_argument("--unfinished", metavar="N", help="most unfinished requests in the list (default: 20)")
    parser.add_argument("--slowest", metavar="N", help="most ended requests in the list (default: 10)")
    parser.add_argument("--decisions", metavar="N", help="also list the scheduler's last N decisions (default: 0)")
    return parser


def path_of(args: Any) -> str:
    """Return the path and query to ask for."""
    path = "/debug/timeline" if args.request is None else f"/debug/requests/{quote(args.request, safe='')}"
    given = {name: getattr(args, name) for name in ("unfinished", "slowest", "decisions", "model")}
    query = "&".join(f"{name}={quote(value, safe='')}" for name, value in given.items() if value is not None)
    return path + (f"?{query}" if query else "")


def fetched(url: str, path: str, api_key: str | None) -> dict[str, Any]:
    """Return a server's answer.

    Raises:
        ConfigError: no server answers at the URL, or it is of another kind.
        OctavoError: the server refuses, with its message.
    """
    import httpx

    url = url.rstrip("/").removesuffix("/v1")
    key = api_key or os.environ.get("OCTAVO_API_KEY") or os.environ.get("VLLM_API_KEY")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        answer = httpx.get(url + path, headers=headers, timeout=_TIMEOUT_S)
        body = answer.json()
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        raise ConfigError(f"no Octavo server answers at {url} ({error}); name it with --url") from error
    if isinstance(body, dict) and answer.is_success and isinstance(body.get("text"), list):
        return body
    told = (
        body.get("error", {}).get("message") if isinstance(body, dict) and isinstance(body.get("error"), dict) else ""
    )
    raise OctavoError(told or f"{url}{path} answered with status {answer.status_code}, and nothing that Octavo says")
