"""Requests as OpenTelemetry spans, sent to a collector by OTLP, within the traces of their clients.

Attribute names are those of OpenTelemetry's semantic conventions for generative AI, and vLLM's, which dashboards use.
"""

from __future__ import annotations

import os
import time
from typing import Any

from opentelemetry import context
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import SpanKind, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from starlette.types import ASGIApp, Receive, Scope, Send

from octavo.core.output import RequestTimes
from octavo.server.metrics.requests import FinishedRequest
from octavo.version import __version__

_HEADERS = (b"traceparent", b"tracestate")
_propagator = TraceContextTextMapPropagator()


class TraceContext:
    """ASGI middleware: attaches a request's task to the trace named in the request's headers."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        carrier = {
            name.decode(): value.decode("latin-1") for name, value in scope.get("headers", ()) if name in _HEADERS
        }
        if not carrier:
            await self._app(scope, receive, send)
            return
        token = context.attach(_propagator.extract(carrier))
        try:
            await self._app(scope, receive, send)
        finally:
            context.detach(token)


class Traces:
    """A span `llm_request` for each finished request, with children `queue`, `prefill` and `decode`.

    OpenTelemetry's variables configure sampling, the service's name and limits.
    """

    def __init__(self, protocol: str, target: str, model: str) -> None:
        """Create the exporter.

        Args:
            protocol: of OTLP, "grpc" or "http/protobuf".
            target: the collector's URL.
            model: the name in the spans.

        Raises:
            ImportError: the protocol's exporter is not installed.
        """
        name = {} if os.environ.get("OTEL_SERVICE_NAME") else {SERVICE_NAME: "octavo"}
        self._model = model
        self._provider = TracerProvider(resource=Resource.create(name), shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(_exporter(protocol, target)))
        self._tracer = self._provider.get_tracer("octavo", __version__)

    joining = TraceContext
    """Middleware that connects requests to their clients' traces."""

    def begin(self) -> context.Context:
        """Return the trace that a request of this task belongs to."""
        return context.get_current()

    def end(self, parent: context.Context, ended: FinishedRequest) -> None:
        """Record a finished request. Takes some tens of microseconds; a thread sends it later."""
        times = ended.times
        clock = time.time_ns() - time.monotonic_ns()
        began, over = _nanoseconds(ended.arrival, clock), _nanoseconds(times.finished if times else 0.0, clock)
        span = self._tracer.start_span(
            "llm_request", parent, SpanKind.SERVER, self._about(ended), start_time=began or None
        )
        if "error" in ended.reasons:
            span.set_status(StatusCode.ERROR)
        if times is not None and span.is_recording():
            inside = set_span_in_context(span, parent)
            for part, start, stop in _parts(times):
                if start and stop:
                    child = self._tracer.start_span(part, inside, start_time=_nanoseconds(start, clock))
                    child.end(_nanoseconds(stop, clock))
        span.end(over or None)

    def close(self) -> None:
        """Send the remaining spans, for at most the exporter's timeout."""
        self._provider.shutdown()

    def _about(self, ended: FinishedRequest) -> dict[str, Any]:
        request, params = ended.request, ended.request.params
        about: dict[str, Any] = {
            "gen_ai.request.id": request.id,
            "gen_ai.request.model": self._model,
            "gen_ai.usage.prompt_tokens": len(request.tokens),
            "gen_ai.usage.input_tokens": len(request.tokens),
            "gen_ai.usage.completion_tokens": ended.generated,
            "gen_ai.usage.output_tokens": ended.generated,
            "gen_ai.response.finish_reasons": ended.reasons,
            "octavo.prompt_tokens_cached": ended.cached,
            "octavo.preemptions": ended.preemptions,
        }
        if not request.prompt_only:
            about |= {
                "gen_ai.request.n": params.n,
                "gen_ai.request.temperature": params.temperature,
                "gen_ai.request.top_p": params.top_p,
            }
            if params.max_tokens is not None:
                about["gen_ai.request.max_tokens"] = params.max_tokens
        if ended.times is not None:
            about |= _latencies(ended.times)
        return about


def _exporter(protocol: str, target: str) -> SpanExporter:
    if protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter

        return GrpcExporter(target, insecure=target.startswith("http://"))
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter

    return HttpExporter(target)


def _latencies(times: RequestTimes) -> dict[str, float]:
    """Return vLLM's attributes, in seconds."""
    spans = {
        "gen_ai.latency.e2e": (times.arrival, times.finished),
        "gen_ai.latency.time_in_queue": (times.arrival, times.first_scheduled),
        "gen_ai.latency.time_to_first_token": (times.arrival, times.first_token),
        "gen_ai.latency.time_in_model_prefill": (times.first_scheduled, times.first_token),
        "gen_ai.latency.time_in_model_decode": (times.first_token, times.finished),
        "gen_ai.latency.time_in_model_inference": (times.first_scheduled, times.finished),
    }
    return {name: end - begin for name, (begin, end) in spans.items() if begin and end}


def _parts(times: RequestTimes) -> tuple[tuple[str, float, float], ...]:
    return (
        ("queue", times.arrival, times.first_scheduled),
        ("prefill", times.first_scheduled, times.first_token or times.finished),
        ("decode", times.first_token, times.finished),
    )


def _nanoseconds(moment: float, clock: int) -> int:
    """Convert a time of `time.monotonic` to nanoseconds since 1970; 0 stays 0."""
    return int(moment * 1e9) + clock if moment else 0
