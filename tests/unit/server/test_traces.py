"""Requests become spans of their clients' traces, at a collector that speaks OTLP over either protocol."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
)
from server_kit import HELLO, Answer, Visitor, ask, make_frontend, make_house, saying

from octavo.config import ServerConfig
from octavo.core.errors import ConfigError
from octavo.server.app import create_app
from octavo.server.tracing.start import check_traces, destination, tracing

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
CHAT = "/v1/chat/completions"
ASK = HELLO | {"temperature": 0.5, "max_tokens": 20}


class Collector:
    """What was sent to it, by span name; the latest of each name."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.requests: list[ExportTraceServiceRequest] = []

    def spans(self) -> dict[str, Any]:
        found = [resource for request in self.requests for resource in request.resource_spans]
        services = {one.value.string_value for r in found for one in r.resource.attributes if one.key == "service.name"}
        assert services == {"octavo"}
        return {span.name: span for resource in found for scope in resource.scope_spans for span in scope.spans}


@contextmanager
def over_http() -> Iterator[Collector]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/traces"
            request = ExportTraceServiceRequest()
            request.ParseFromString(self.rfile.read(int(self.headers["content-length"])))
            collector.requests.append(request)
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *args: Any) -> None:
            """Nowhere."""

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        collector = Collector(f"http://127.0.0.1:{server.server_port}")
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield collector
        finally:
            server.shutdown()
            thread.join()


@contextmanager
def over_grpc() -> Iterator[Collector]:
    class Service(TraceServiceServicer):
        def Export(self, request: ExportTraceServiceRequest, context: Any) -> ExportTraceServiceResponse:
            collector.requests.append(request)
            return ExportTraceServiceResponse()

    server = grpc.server(ThreadPoolExecutor(2))
    add_TraceServiceServicer_to_server(Service(), server)
    collector = Collector(f"grpc://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}")
    server.start()
    try:
        yield collector
    finally:
        server.stop(None).wait()


@pytest.fixture(params=[over_http, over_grpc], ids=["http", "grpc"])
def collector(request: pytest.FixtureRequest) -> Iterator[Collector]:
    with request.param() as collector:
        yield collector


async def traced(collector: Collector, path: str, body: dict[str, Any], *, leaves: bool = False) -> Answer:
    house = make_house(saying("one two three"))
    config = ServerConfig(otlp_traces_endpoint=collector.url)
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
    async with tracing(config, "toy") as traces:
        app = create_app(make_frontend(house.engine), config, traces=traces)
        if not leaves:
            return await ask(app, path, body, headers=headers)
        visitor = Visitor(app, path, body, headers=headers)
        await visitor.heard.wait()
        visitor.leaves.set()
        return await visitor.whole()


def about(span: Any) -> dict[str, Any]:
    kinds = {"int_value": int, "double_value": float, "string_value": str}
    found = {}
    for one in span.attributes:
        kind = one.value.WhichOneof("value")
        value = getattr(one.value, kind)
        found[one.key] = [part.string_value for part in value.values] if kind == "array_value" else kinds[kind](value)
    return found


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_is_a_span_of_its_clients_trace(collector: Collector, stream: bool) -> None:
    answer = asyncio.run(traced(collector, CHAT, ASK | {"stream": stream, "stream_options": None}))
    assert answer.status == 200
    spans = collector.spans()
    assert set(spans) == {"llm_request", "queue", "prefill", "decode"}
    request = spans["llm_request"]
    assert (request.trace_id.hex(), request.parent_span_id.hex()) == (TRACE, PARENT)
    for part in ("queue", "prefill", "decode"):
        assert spans[part].parent_span_id == request.span_id
        assert spans[part].trace_id == request.trace_id
    assert spans["queue"].end_time_unix_nano == spans["prefill"].start_time_unix_nano
    assert spans["prefill"].end_time_unix_nano == spans["decode"].start_time_unix_nano
    assert request.start_time_unix_nano == spans["queue"].start_time_unix_nano
    assert request.end_time_unix_nano == spans["decode"].end_time_unix_nano
    told = about(request)
    assert told["gen_ai.request.model"] == "toy"
    assert told["gen_ai.request.temperature"] == 0.5
    assert told["gen_ai.request.max_tokens"] == 20
    assert told["gen_ai.usage.completion_tokens"] == told["gen_ai.usage.output_tokens"] > 0
    assert told["gen_ai.usage.prompt_tokens"] > 0
    assert told["gen_ai.response.finish_reasons"] == ["stop"]
    whole = (request.end_time_unix_nano - request.start_time_unix_nano) / 1e9
    assert told["gen_ai.latency.e2e"] == pytest.approx(whole, abs=1e-5)
    assert {"gen_ai.latency.time_in_queue", "gen_ai.latency.time_to_first_token"} < set(told)


def test_a_client_that_leaves_has_a_span_too() -> None:
    with over_http() as collector:
        asyncio.run(traced(collector, CHAT, ASK | {"stream": True}, leaves=True))
        assert about(collector.spans()["llm_request"])["gen_ai.response.finish_reasons"] == ["abort"]


def test_no_collector_stops_nobody(unused_tcp_port_url: str) -> None:
    assert asyncio.run(traced(Collector(unused_tcp_port_url), CHAT, ASK)).status == 200


@pytest.fixture
def unused_tcp_port_url(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "1")
    return "http://127.0.0.1:9"


@pytest.mark.parametrize(
    ("endpoint", "asked", "expected"),
    [
        ("grpc://host:1", None, ("grpc", "http://host:1")),
        ("http://host:4317", None, ("grpc", "http://host:4317")),
        ("http://host:4318", None, ("http/protobuf", "http://host:4318/v1/traces")),
        ("https://host/otel/v1/traces", None, ("http/protobuf", "https://host/otel/v1/traces")),
        ("https://host:4318", "grpc", ("grpc", "https://host:4318")),
        ("http://host:4317", "http/protobuf", ("http/protobuf", "http://host:4317/v1/traces")),
    ],
)
def test_which_protocol(
    monkeypatch: pytest.MonkeyPatch, endpoint: str, asked: str | None, expected: tuple[str, str]
) -> None:
    if asked:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", asked)
    assert destination(endpoint) == expected


@pytest.mark.parametrize(
    ("endpoint", "asked", "says"),
    [
        ("localhost:4317", None, "is not a collector's URL"),
        ("http://host:port", None, "is not a collector's URL"),
        ("http://host:4318", "http/json", "must be one of grpc, http/protobuf"),
        ("grpc://host:4317", "http/protobuf", "not for gRPC"),
    ],
)
def test_what_can_not_be_is_refused_at_the_start(
    monkeypatch: pytest.MonkeyPatch, endpoint: str, asked: str | None, says: str
) -> None:
    if asked:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", asked)
    with pytest.raises(ConfigError, match=says):
        check_traces(ServerConfig(otlp_traces_endpoint=endpoint))


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(ConfigError, match=r"pip install 'octavo\[tracing\]'"):
        check_traces(ServerConfig(otlp_traces_endpoint="http://host:4318"))
