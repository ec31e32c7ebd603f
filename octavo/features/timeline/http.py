"""`GET /debug/requests/{id}` and `GET /debug/timeline`: what the engine did, and what this server saw of it."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from urllib.parse import quote

import msgspec
from fastapi import APIRouter
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from octavo.core.errors import EngineDeadError, InvalidRequestError
from octavo.core.request import PLACEHOLDER, answers_to
from octavo.features.timeline.story import NAME, Story, Told
from octavo.features.timeline.words import Seen, decision_line, engine_line, lines, seen_line, summary
from octavo.server.context import ServerContext
from octavo.server.errors import ApiError, json_response
from octavo.server.metrics.requests import EndedRequest, RequestRecord

BODIES: Sequence[type[BaseModel]] = []

_ANSWER_S = 2.0
"""An engine answers between steps. After this time the answer goes without it."""
_OWN = "/own/requests"
_MOST = 1000
_TEXT_TOKENS = 1 << 16
"""A miss further back in a prompt has no text offset: its tokens would have to be made text for it."""


def routes(ctx: ServerContext) -> APIRouter:
    """Return the two routes."""
    router = APIRouter(tags=["status"])

    async def timeline(request: Request) -> Response:
        """Explain one unfinished or recent request: its id is that of its answer, or the engine's. No prompts."""
        name = request.path_params["request_id"]
        seen, (told, silent) = await asyncio.gather(_seen(ctx, name, request), _ask(ctx, "find", {"id": name}))
        stories = [story for one in told for story in one.stories]
        if not stories and not seen:
            raise _unknown(ctx, name, silent)
        return json_response(_explained(ctx, name, stories, told, seen, silent))

    async def overview(request: Request) -> Response:
        """Explain the oldest unfinished requests and the slowest of the recent ones, in a line each."""
        wish = {what: _number(request, what, usual) for what, usual in _LISTED.items()}
        if not ctx.frontend.preparer.hook(NAME).present:
            raise _off()
        told, silent = await _ask(ctx, "list", wish)
        return json_response(_listed(ctx, told, wish, silent))

    router.add_api_route("/debug/requests/{request_id:path}", timeline, methods=["GET"])
    router.add_api_route("/debug/timeline", overview, methods=["GET"])
    return router


_LISTED = {"unfinished": 20, "slowest": 10, "decisions": 0}
"""What `/debug/timeline` lists: query parameter -> how many of them without it."""


def private(ctx: ServerContext) -> APIRouter:
    """Return the route by which other API processes ask for what this one saw."""
    router = APIRouter()

    async def own(request: Request) -> Response:
        seen = _own(ctx, request.query_params.get("id", ""))
        if not seen:
            return Response(status_code=404)
        return json_response(seen)

    router.add_api_route(_OWN, own, methods=["GET"])
    return router


def limits(ctx: ServerContext) -> Mapping[str, list[dict[str, Any]]]:
    """Return nothing: there are no bodies."""
    return {}


async def _ask(ctx: ServerContext, method: str, args: dict[str, Any]) -> tuple[list[Told], list[str]]:
    """Ask every engine; return the answers, and why others gave none."""
    if not ctx.frontend.preparer.hook(NAME).present:
        return [], []
    replicas = ctx.frontend.engine.replicas
    calls = (asyncio.wait_for(replica.call(NAME, method, args), _ANSWER_S) for replica in replicas)
    told, silent = [], []
    for number, found in enumerate(await asyncio.gather(*calls, return_exceptions=True)):
        which = "the engine" if len(replicas) == 1 else f"replica {number}"
        if isinstance(found, TimeoutError):
            silent.append(f"{which} has not answered within {_ANSWER_S:g} s: a step, or a command, takes that long")
        elif isinstance(found, EngineDeadError):
            silent.append(f"{which} is dead: {found}")
        elif isinstance(found, BaseException):
            raise found
        else:
            told.append(msgspec.convert(found, Told))
    return told, silent


async def _seen(ctx: ServerContext, name: str, request: Request) -> list[Seen]:
    """Return what this process saw of a request, or else another one."""
    seen = _own(ctx, name)
    if seen or ctx.siblings is None:
        return seen
    answer = await ctx.siblings.first("GET", f"{_OWN}?id={quote(name, safe='')}", request.state.request_id)
    if answer is None or answer.status_code != 200:
        return []
    return msgspec.json.decode(bytes(answer.body), type=list[Seen])


def _own(ctx: ServerContext, name: str) -> list[Seen]:
    requests = ctx.metrics.requests
    ended = [_seen_whole(one) for one in requests.recent if _is(one.id, name)]
    return ended + [_seen_live(ctx, one) for one in requests.live if _is(one.request.id, name)]


def _is(request_id: str, name: str) -> bool:
    return request_id == name or answers_to(request_id, name)


def _seen_whole(one: EndedRequest) -> Seen:
    return Seen(
        id=one.id,
        arrival=one.arrival,
        begun=one.begun,
        first_output=one.first_output,
        last_output=one.last_output,
        ended=one.ended,
        prompt_tokens=one.prompt_tokens,
        generated=one.generated,
        reasons=list(one.reasons),
        cause=one.cause,
    )


def _seen_live(ctx: ServerContext, record: RequestRecord) -> Seen:
    return Seen(
        id=record.request.id,
        arrival=record.arrival,
        begun=record.begun,
        first_output=record.first_output,
        last_output=record.last_output,
        prompt_tokens=len(record.request.tokens),
        generated=ctx.frontend.engine.received(record.request.id).tokens,
    )


def _explained(
    ctx: ServerContext, name: str, stories: list[Story], told: list[Told], seen: list[Seen], silent: list[str]
) -> dict[str, Any]:
    now = max((one.now for one in told), default=time.monotonic())
    offsets = _text_offsets(ctx, stories)
    by_id = {one.id: one for one in seen}
    ids = dict.fromkeys([*by_id, *(story.id for story in stories)])
    text: list[str] = []
    for request_id in ids:
        own = sorted((story for story in stories if story.id == request_id), key=lambda story: story.index)
        text += lines(own, by_id.get(request_id), now, offsets.get(request_id))
    return {
        "id": name,
        "now": now,
        "text": text + silent,
        "engine": msgspec.to_builtins(stories),
        "server": msgspec.to_builtins(seen),
    }


def _text_offsets(ctx: ServerContext, stories: Iterable[Story]) -> dict[str, int]:
    """Return where in the prompt's text the first miss is, for requests that this process has not ended."""
    prompts = {record.request.id: record.request.tokens for record in ctx.metrics.requests.live}
    found = {}
    for story in stories:
        tokens = prompts.get(story.id)
        if tokens is None or not story.misses or story.index or story.misses[0].position > _TEXT_TOKENS:
            continue
        before = tokens[: story.misses[0].position]
        if PLACEHOLDER not in before and ctx.frontend.tokenizer.present:
            found[story.id] = len(ctx.frontend.tokenizer.decode(before, skip_special_tokens=False))
    return found


def _listed(ctx: ServerContext, told: Sequence[Told], wish: Mapping[str, int], silent: list[str]) -> dict[str, Any]:
    """Return the stories of all engines in order, with their clock's time, and a line for each. If an engine is silent,
    the requests that this process has sent to it are listed instead."""
    now = max((one.now for one in told), default=time.monotonic())
    stories = [story for one in told for story in one.stories]
    unfinished = sorted((one for one in stories if not one.ended), key=lambda one: one.arrival)[: wish["unfinished"]]
    slowest = sorted((one for one in stories if one.ended), key=lambda one: -one.seconds)[: wish["slowest"]]
    every = sorted(itertools.chain(*(one.decisions for one in told)), key=lambda decision: decision.at)
    decisions = every[-wish["decisions"] :] if wish["decisions"] else []
    text = [engine_line(ctx.frontend.engine.stats()), *silent]
    text += [f"{len(unfinished)} unfinished, the oldest first:"] if unfinished else []
    text += [f"  {summary(story, now)}" for story in unfinished]
    if silent:
        oldest = sorted(ctx.metrics.requests.live, key=lambda record: record.arrival)[: wish["unfinished"]]
        text += [f"  {seen_line(_seen_live(ctx, record), now)}" for record in oldest]
    text += [f"the slowest {len(slowest)} of those that have ended:"] if slowest else []
    text += [f"  {summary(story, now)}" for story in slowest]
    text += [f"the last {len(decisions)} decisions:"] if decisions else []
    text += [f"  {decision_line(decision, now)}" for decision in decisions]
    return {
        "now": now,
        "text": text,
        "unfinished": msgspec.to_builtins(unfinished),
        "slowest": msgspec.to_builtins(slowest),
        "decisions": msgspec.to_builtins(decisions),
    }


def _number(request: Request, name: str, usual: int) -> int:
    given = request.query_params.get(name, str(usual))
    if not (given.isascii() and given.isdecimal() and int(given[:9]) <= _MOST):
        text = f"{name} must be a whole number from 0 to {_MOST}, got {given!r}."
        raise InvalidRequestError(text, param=name, value=given)
    return int(given)


def _unknown(ctx: ServerContext, name: str, silent: Sequence[str]) -> ApiError:
    if not ctx.frontend.preparer.hook(NAME).present:
        return _off()
    if silent:
        return ApiError(503, f"Request {name} is not known to this server, and {silent[0]}.")
    return ApiError(
        404,
        f"Request {name} is not known: it is not unfinished, and not among the last ones that ended "
        "(--request-history). Its id is the `id` of its answer; GET /debug/timeline lists requests.",
    )


def _off() -> ApiError:
    return ApiError(404, "This server keeps no timelines; start it without --request-history 0.")
