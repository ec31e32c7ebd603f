"""Pages of lists, in the form of OpenAI's API."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from octavo.server.body import require
from octavo.server.errors import json_response


def ascends(request: Request) -> bool:
    """Return whether the oldest row is to come first, as the query's `order` says; by default it comes last."""
    order = request.query_params.get("order", "desc")
    require(order in ("asc", "desc"), "order", order, "order must be asc or desc.")
    return order == "asc"


def page(request: Request, rows: Sequence[tuple[str, Any]], size: int, largest: int) -> Response:
    """Return one page of a list: at most `limit` rows, after the id `after`."""
    limit = request.query_params.get("limit", str(size))
    good = limit.isdecimal() and len(limit) < 10 and 1 <= int(limit) <= largest
    require(good, "limit", limit, f"limit must be from 1 to {largest}, got {limit!r}.")
    after = request.query_params.get("after")
    start = 0
    if after is not None:
        names = [name for name, _ in rows]
        require(after in names, "after", after, "after must be the id of a row of this list.")
        start = names.index(after) + 1
    found = rows[start : start + int(limit)]
    return json_response(
        {
            "object": "list",
            "data": [row for _, row in found],
            "first_id": found[0][0] if found else None,
            "last_id": found[-1][0] if found else None,
            "has_more": start + len(found) < len(rows),
        }
    )
