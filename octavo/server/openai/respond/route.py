"""`/v1/responses`: create a response, stream it, run it in the background, and retrieve or follow it later."""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from octavo.core.errors import InvalidRequestError
from octavo.core.params import SamplingParams
from octavo.server.body import parse_body, require
from octavo.server.context import ServerContext, answer_id
from octavo.server.errors import ApiError, as_api_error, json_response
from octavo.server.openai.chat import Chat, count_chat, prepare_chat
from octavo.server.openai.generation import run
from octavo.server.openai.logprobs import LogprobWriter
from octavo.server.openai.respond.events import EventLog, Numbered, event_of_error
from octavo.server.openai.respond.items import told_item
from octavo.server.openai.respond.output import COMPLETED, IN_PROGRESS, INCOMPLETE, ResponseEvent, ResponseOutput
from octavo.server.openai.respond.protocol import InputItems, ResponseBody, as_chat, in_own_names
from octavo.server.openai.respond.store import CANCELLED, QUEUED, ResponseStore, Stored
from octavo.server.openai.unsupported import check_extras
from octavo.server.page import ascends, page
from octavo.server.stream import EventStream, until_disconnect

KEPT = "/own/kept"
"""Path for other processes to learn whether this one keeps a response."""
RECALLED = "/own/responses"
"""Path for other processes to retrieve a response and its input."""
RECALLED_ITEMS = "/own/items"
"""Path for other processes to retrieve an output item."""
_FAILED = "failed"
_PREFIX = "resp_"
_ITEM_ID = re.compile("[a-z]+_[0-9a-f]+")
_CUT = {"length": "max_output_tokens", "repetition": "repetition", "abort": "abort"}
"""Finish reasons of incomplete answers -> the reason in `incomplete_details`. A stop string may also cut a call."""


@dataclass(slots=True)
class _Making:
    """A response in progress."""

    chat: Chat
    response: dict[str, Any]
    input: InputItems
    writer: LogprobWriter
    tells_messages: bool
    output: ResponseOutput = field(default_factory=ResponseOutput)
    cached: int = 0
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    reasoning_tokens: int = 0
    finish: str = ""


class Responses:
    """The routes of the Responses API, and their stored responses."""

    def __init__(self, ctx: ServerContext) -> None:
        self._ctx = ctx
        self._store = ResponseStore()

    async def create(self, request: Request) -> Response:
        """Answer the input, whole, streamed or in the background."""
        body = await parse_body(request, ResponseBody, self._ctx.config.max_body_bytes)
        keep = body.store is not False
        text = "background can only be used when `store` is true; store the response, or wait for it."
        require(keep or not body.background, "background", True, text)
        making = await self._prepare(request, body)
        if body.background:
            stored = self._begin(making, EventLog() if body.stream else None)
            return json_response(stored.response) if stored.log is None else self._follow(stored.log)
        if body.stream:
            told = Numbered()
            return EventStream(
                self._stream(making, told, keep=keep),
                closing=b"",
                on_error=told.error,
                keep_alive_s=self._ctx.config.sse_keep_alive_s,
            )
        await until_disconnect(request.receive, self._drive(making))
        if keep:
            self._keep(making)
        return json_response(making.response)

    async def count_tokens(self, request: Request) -> Response:
        """Count the tokens of the input, with instructions and tools."""
        body = await parse_body(request, ResponseBody, self._ctx.config.max_body_bytes)
        ctx = await self._ctx.for_model(body.model, body)
        body.input = await self._resolved(request, body.items)
        earlier = await self._earlier(request, body.previous_response_id)
        translated = as_chat(body, earlier)
        with in_own_names(body, earlier):
            count = await count_chat(ctx, translated)
        return json_response({"object": "response.input_tokens", "input_tokens": count})

    def keeps(self, name: str) -> bool:
        """Return whether this process has stored a response."""
        return name in self._store

    def recalled(self, name: str) -> Response:
        """Return a response and its input, for another process."""
        stored = self._store.get(name)
        return json_response([stored.response, stored.input])

    def recalled_item(self, name: str) -> Response:
        """Return an output item, for another process."""
        item = self._store.item(name)
        if item is None:
            raise ApiError(404, f"There is no item {name!r} here.")
        return json_response(item)

    async def retrieve(self, request: Request, name: str) -> Response:
        """Return a response in its current state, or the events of one that was created with `background` and `stream`:
        those after the number `starting_after`, as they come."""
        streams, after = _query(request)
        stored = self._store.get(name)
        if not streams:
            return json_response(stored.response)
        text = (
            "This response has no events to stream: only one that was created with background and stream has. Retrieve "
            "it without stream, again until it is complete."
        )
        if stored.log is None:
            raise InvalidRequestError(text, param="stream", value=True)
        return self._follow(stored.log, after)

    def _follow(self, log: EventLog, after: int = -1) -> Response:
        return EventStream(log.after(after), closing=b"", keep_alive_s=self._ctx.config.sse_keep_alive_s)

    async def delete(self, request: Request, name: str) -> Response:
        """Delete a response; abort it if it is in progress."""
        self._store.delete(name)
        return json_response({"id": name, "object": "response", "deleted": True})

    async def input_items(self, request: Request, name: str) -> Response:
        """Return a page of the input items of a response, the last one first."""
        items = [told_item(number, item) for number, item in enumerate(self._store.get(name).input)]
        ordered = items if ascends(request) else items[::-1]
        return page(request, [(item["id"], item) for item in ordered], 20, 100)

    async def cancel(self, request: Request, name: str) -> Response:
        """Cancel a background response."""
        stored = self._store.get(name)
        if stored.task is None:
            raise ApiError(
                400,
                "Cannot cancel a synchronous response. Only a background response can be cancelled.",
                param="response_id",
            )
        stored.task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await stored.task
        return json_response(stored.response)

    async def _prepare(self, request: Request, body: ResponseBody) -> _Making:
        ctx = await self._ctx.for_request(request, body.model, body)
        earlier = await self._earlier(request, body.previous_response_id)
        body.input = await self._resolved(request, body.items)
        translated = as_chat(body, earlier)
        warnings = check_extras(ctx, translated, chat=True)
        name = answer_id(request, translated.request_id, _PREFIX)
        with in_own_names(body, earlier):
            chat = await prepare_chat(ctx, translated, name)
        params = chat.job.request.params
        response = _begun(body, params, name, ctx.model)
        if warnings:
            response["warnings"] = warnings
        writer = LogprobWriter(ctx.frontend.tokenizer, params, as_ids=False)
        return _Making(chat, response, earlier + body.items, writer, bool(body.enable_response_messages))

    async def _resolved(self, request: Request, items: InputItems) -> InputItems:
        """Return the items, with those that are referred to in place of the references."""
        return [
            await self._referred(request, number, item) if item.get("type") == "item_reference" else item
            for number, item in enumerate(items)
        ]

    async def _referred(self, request: Request, number: int, reference: dict[str, Any]) -> dict[str, Any]:
        """
        Raises:
            ApiError: 404, no response that is kept has this item.
            InvalidRequestError: the reference has no id.
        """
        name, param = reference.get("id"), f"input.{number}.id"
        text = f"{param} must be the id of an output item of an earlier response."
        require(isinstance(name, str) and _ITEM_ID.fullmatch(name) is not None, param, name, text)
        found = self._store.item(str(name))
        siblings = self._ctx.siblings
        if found is None and siblings is not None:
            told = await siblings.first("GET", f"{RECALLED_ITEMS}/{name}", request.state.request_id)
            found = msgspec.json.decode(told.body) if told is not None and told.status_code == 200 else None
        if found is None:
            text = (
                f"Item with id '{name}' not found. Its response was never stored, or is no longer kept; send the item."
            )
            raise ApiError(404, text, param=param)
        item: dict[str, Any] = found
        return item

    async def _earlier(self, request: Request, previous: str | None) -> InputItems:
        """Return the conversation that a response continues."""
        if previous is None:
            return []
        text = "previous_response_id must be the id of a response, which begins with 'resp_'."
        require(previous.startswith(_PREFIX), "previous_response_id", previous, text)
        before = await self._recall(previous, request)
        busy = before.response["status"] in (QUEUED, IN_PROGRESS)
        require(not busy, "previous_response_id", previous, "That response is not finished yet.")
        items: InputItems = before.input + before.response["output"]
        return items

    async def _recall(self, name: str, request: Request) -> Stored:
        """Return an earlier response from any process.

        Raises:
            ApiError: 404, it was never stored or is no longer.
        """
        siblings = self._ctx.siblings
        if siblings is not None and not self.keeps(name):
            found = await siblings.first("GET", f"{RECALLED}/{name}", request.state.request_id)
            if found is not None and found.status_code == 200:
                response, answered = msgspec.json.decode(found.body)
                return Stored(response, answered)
        return self._store.get(name, "previous_response_id")

    async def _events(self, making: _Making) -> AsyncIterator[list[ResponseEvent]]:
        """Yield the events of the output in groups as they arrive. The response is complete at the end."""
        (routed,) = making.chat.choices()
        async with aclosing(run(self._ctx, [making.chat.job])) as outputs:
            async for _, output in outputs:
                (choice,) = output.outputs
                thought = routed.reasoning_tokens
                news = routed.take(choice)
                told = choice.logprobs and (news.content or routed.reasoning_tokens == thought)
                making.cached = max(making.cached, output.num_cached_tokens)
                making.text += choice.text
                making.tokens += choice.token_ids
                making.finish = news.finish or making.finish
                making.response |= choice.extra or {}
                yield list(making.output.take(news, making.writer.chat(choice) if told else None))
        making.reasoning_tokens = routed.reasoning_tokens
        status = INCOMPLETE if routed.cut or making.finish in _CUT else COMPLETED
        yield list(making.output.close(status, call=INCOMPLETE if routed.cut else COMPLETED))
        _complete(making, status)

    async def _drive(self, making: _Making) -> None:
        async for _ in self._events(making):
            pass

    async def _stream(self, making: _Making, told: Numbered, *, keep: bool) -> AsyncGenerator[bytes, None]:
        opening = [_of_response(kind, making) for kind in ("created", IN_PROGRESS)]
        failure: ApiError | None = None
        try:
            async for events in self._events(making):
                events, opening = opening + events, []
                if events:
                    yield b"".join(map(told, events))
        except Exception as exc:
            if opening:
                raise
            failure = as_api_error(exc, making.response["id"])
            yield b"".join(map(told, _fail(making, failure)))
        if keep:
            self._keep(making)
        yield told(_of_response(making.response["status"], making))
        if failure is not None:
            raise failure

    def _begin(self, making: _Making, log: EventLog | None) -> Stored:
        making.response["status"] = QUEUED
        stored = Stored(making.response, making.input, log)
        stored.tell(_of_response("created", making), _of_response(QUEUED, making))
        stored.run(self._work(making, stored))
        self._store.put(stored)
        return stored

    async def _work(self, making: _Making, stored: Stored) -> None:
        """Run a background response; on shutdown the server waits for it."""
        with self._ctx.lifecycle.serving():
            making.response["status"] = IN_PROGRESS
            stored.tell(_of_response(IN_PROGRESS, making))
            failure: list[ResponseEvent] = []
            try:
                async for events in self._events(making):
                    stored.tell(*events)
            except asyncio.CancelledError:
                stored.tell(*making.output.close(INCOMPLETE))
                _complete(making, CANCELLED)
                raise
            except Exception as exc:
                error = as_api_error(exc, making.response["id"])
                stored.tell(*_fail(making, error))
                failure = [event_of_error(error)]
            finally:
                stored.end(*failure)
                with contextlib.suppress(ApiError):
                    self._store.get(making.response["id"])
                    self._store.put(stored)

    def _keep(self, making: _Making) -> None:
        self._store.put(Stored(making.response, making.input))


def _query(request: Request) -> tuple[bool, int]:
    """Return whether events are asked for, and the number of the event after which they begin; -1 for all.

    Raises:
        InvalidRequestError: a parameter has another form.
    """
    stream, after = (request.query_params.get(name) for name in ("stream", "starting_after"))
    known = {None: False, "false": False, "0": False, "true": True, "1": True}
    streams = known.get(stream if stream is None else stream.lower())
    if streams is None:
        raise InvalidRequestError("stream must be true or false.", param="stream", value=stream)
    if after is None:
        return streams, -1
    text = "starting_after must be the sequence_number of an event: an integer from 0 on."
    require(re.fullmatch("[0-9]{1,18}", after) is not None, "starting_after", after, text)
    require(streams, "starting_after", after, "starting_after is for streams; set stream to true, or leave it out.")
    return streams, int(after)


def _of_response(kind: str, making: _Making) -> ResponseEvent:
    """Return an event with the response as it is now."""
    return {"type": f"response.{kind}", "response": dict(making.response)}


def _begun(body: ResponseBody, params: SamplingParams, name: str, model: str) -> dict[str, Any]:
    """Return a response without its output."""
    return {
        "id": name,
        "object": "response",
        "created_at": int(time.time()),
        "completed_at": None,
        "status": IN_PROGRESS,
        "background": bool(body.background),
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "model": model,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "reasoning": {"effort": (body.reasoning or {}).get("effort"), "summary": None},
        "store": body.store is not False,
        "temperature": params.temperature,
        "text": body.text or {"format": {"type": "text"}},
        "tool_choice": body.tool_choice or "auto",
        "tools": body.tools or [],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": params.top_p,
        "truncation": "disabled",
        "usage": None,
        "user": body.user,
    }


def _complete(making: _Making, status: str) -> None:
    response, job = making.response, making.chat.job
    prompt, written = len(job.prompt_tokens), len(making.tokens)
    response["status"] = status
    response["completed_at"] = int(time.time())
    response["output"] = making.output.items
    response["usage"] = {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": making.cached, "cache_write_tokens": 0},
        "output_tokens": written,
        "output_tokens_details": {"reasoning_tokens": making.reasoning_tokens},
        "total_tokens": prompt + written,
    }
    if making.tells_messages:
        response["input_messages"] = [_raw(str(job.text or ""), job.prompt_tokens)]
        response["output_messages"] = [_raw(making.text, making.tokens)]
    if status == INCOMPLETE:
        response["incomplete_details"] = {"reason": _CUT.get(making.finish, "stop")}


def _fail(making: _Making, error: ApiError) -> list[ResponseEvent]:
    """End a response that failed; return the events that end its last item."""
    events = list(making.output.close(INCOMPLETE)) if making.output.items else []
    making.response["error"] = {"code": "server_error", "message": error.message}
    _complete(making, _FAILED)
    return events


def _raw(text: str, tokens: list[int]) -> dict[str, Any]:
    """Return a message in the form that the model reads or writes."""
    return {"type": "raw_message_tokens", "message": text, "tokens": tokens}
