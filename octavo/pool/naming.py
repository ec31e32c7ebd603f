"""Which model a request names: in its JSON, its form, or its query."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any

import msgspec
from python_multipart import MultipartParser
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import parse_options_header
from starlette.requests import Request
from starlette.types import Message, Receive

from octavo.core.errors import InvalidRequestError
from octavo.server.body import check_content_type, decode_json, read_body
from octavo.server.errors import ApiError
from octavo.server.ollama.errors import speaks_ollama

if TYPE_CHECKING:
    from python_multipart.multipart import MultipartCallbacks

FIELD = "model"
_SPOOLED = 1 << 20
_PIECE = 1 << 18
_LONGEST_NAME = 4096
_FORM = "multipart/form-data"


class _Named(msgspec.Struct):
    model: msgspec.Raw = msgspec.Raw(b"null")


@dataclass(slots=True)
class Body:
    """A request's body, read to its end, and the model that it names; None if it names none.

    Close it after use.
    """

    model: str | None
    content: IO[bytes] | bytes = b""

    def receive(self, after: Receive) -> Receive:
        """Return what sends the body again; then `after`, which reports that the client has disconnected."""
        pieces = self._pieces()

        async def again() -> Message:
            message = next(pieces, None)
            return await after() if message is None else message

        return again

    def _pieces(self) -> Iterator[Message]:
        if isinstance(self.content, bytes):
            yield {"type": "http.request", "body": self.content, "more_body": False}
            return
        self.content.seek(0)
        while piece := self.content.read(_PIECE):
            yield {"type": "http.request", "body": piece, "more_body": True}
        yield {"type": "http.request", "body": b"", "more_body": False}

    def close(self) -> None:
        if not isinstance(self.content, bytes):
            self.content.close()


async def named_body(request: Request, max_json: int, max_form: int) -> Body:
    """Read a request's body. The name in the body precedes that in the query.

    Args:
        max_json, max_form: most bytes of JSON and of a form; the model's process may allow less.

    Raises:
        ApiError: as for `parse_body`; 413, a form that is too large.
        InvalidRequestError: the model's name is not a string.
    """
    asked = query_model(request)
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind == _FORM:
        body = await _read_form(request, max_form)
        body.model = body.model or asked
        return body
    data = await read_body(request, max_json)
    if not data.strip():
        return Body(asked, data)
    # As in a server of one model: Ollama's clients may name any content type, pages of other sites may not.
    ollama = speaks_ollama(request.scope)
    check_content_type(request, any_type=ollama and "origin" not in request.headers)
    return Body(_json_model(data, *(("name",) if ollama else ())) or asked, data)


def query_model(request: Request) -> str | None:
    """Return the model that `?model=` names."""
    return request.query_params.get(FIELD)


def _json_model(data: bytes, *others: str) -> str | None:
    """Return the model in a JSON object, or what another field names if there is none."""
    try:
        model: Any = msgspec.json.decode(msgspec.json.decode(data, type=_Named).model)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        model = decode_json(data).get(FIELD)  # raises the error that a server of one model answers with
    for name in others if model is None else ():
        model = decode_json(data).get(name)
    if model is not None and not isinstance(model, str):
        raise InvalidRequestError("model must be a string, the name of a model.", param=FIELD, value=model)
    found: str | None = model
    return found


async def _read_form(request: Request, limit: int) -> Body:
    spool = tempfile.SpooledTemporaryFile(max_size=_SPOOLED)  # noqa: SIM115 (the caller closes it)
    try:
        finder = _FieldFinder(request.headers.get("content-type", ""))
        size = 0
        async for piece in request.stream():
            size += len(piece)
            if size > limit:
                raise ApiError(413, f"The form is larger than the {limit:,} bytes that this server takes. Send less.")
            spool.write(piece)
            finder.feed(piece)
    except BaseException:
        spool.close()
        raise
    return Body(finder.value, spool)


class _FieldFinder:
    """Finds the value of the field `model` in a form that arrives in pieces (RFC 7578).

    A malformed form has no value: the model's process, or the error about a missing model, says the rest.
    """

    def __init__(self, content_type: str) -> None:
        self.value: str | None = None
        self._name = self._header = b""
        self._open: bytearray | None = None
        boundary = parse_options_header(content_type)[1].get(b"boundary")
        self._parser = MultipartParser(boundary, self._callbacks()) if boundary else None

    def _callbacks(self) -> MultipartCallbacks:
        return {
            "on_header_begin": self._header_begin,
            "on_header_field": self._header_name,
            "on_header_value": self._header_value,
            "on_header_end": self._header_end,
            "on_part_data": self._data,
            "on_part_end": self._end,
        }

    def feed(self, data: bytes) -> None:
        if self._parser is None:
            return
        try:
            self._parser.write(data)
        except FormParserError:
            self._parser = None

    def _header_begin(self) -> None:
        self._name = self._header = b""

    def _header_name(self, data: bytes, start: int, end: int) -> None:
        self._name += data[start:end]

    def _header_value(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]

    def _header_end(self) -> None:
        if self._name.lower() == b"content-disposition":
            options = parse_options_header(self._header)[1]
            if options.get(b"name") == FIELD.encode() and b"filename" not in options:
                self._open = bytearray()

    def _data(self, data: bytes, start: int, end: int) -> None:
        if self._open is not None and len(self._open) < _LONGEST_NAME:
            self._open += data[start:end]

    def _end(self) -> None:
        if self._open is not None:
            self.value = self._open.decode("utf-8", "replace")
        self._open = None
