"""Setup of tracing: without `--otlp-traces-endpoint` no part of OpenTelemetry is imported."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from octavo.config import ServerConfig
from octavo.core.errors import ConfigError

if TYPE_CHECKING:
    from octavo.server.tracing.traces import Traces

_PROTOCOL = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_PROTOCOLS = ("grpc", "http/protobuf")
_SCHEMES = ("grpc", "http", "https")
_GRPC_PORT = 4317
"""The registered port of OTLP over gRPC; 4318 is that of HTTP."""
_HTTP_PATH = "/v1/traces"


def check_traces(config: ServerConfig) -> None:
    """Check the settings of tracing.

    Raises:
        ConfigError: the endpoint is not a URL, the protocol is unknown, or OpenTelemetry is not installed.
    """
    if config.otlp_traces_endpoint is not None:
        _start(config.otlp_traces_endpoint, "").close()


@asynccontextmanager
async def tracing(config: ServerConfig, model: str) -> AsyncIterator[Traces | None]:
    """Open traces for the time of the block, and send the last ones at its end; None if disabled.

    Args:
        model: the name in the traces.
    """
    if config.otlp_traces_endpoint is None:
        yield None
        return
    traces = _start(config.otlp_traces_endpoint, model)
    try:
        yield traces
    finally:
        await asyncio.to_thread(traces.close)


def _start(endpoint: str, model: str) -> Traces:
    protocol, target = destination(endpoint)
    try:
        from octavo.server.tracing.traces import Traces

        return Traces(protocol, target, model)
    except ImportError as exc:
        raise ConfigError(
            f"--otlp-traces-endpoint needs OpenTelemetry with OTLP over {protocol} ({exc.name} is missing): "
            "pip install 'octavo[tracing]'"
        ) from exc


def destination(endpoint: str) -> tuple[str, str]:
    """Return the protocol, and the URL in the form of its exporter.

    The protocol is that of OpenTelemetry's variables; else gRPC for grpc:// and for its port, else HTTP.
    """
    parts = urlsplit(endpoint)
    try:
        port = parts.port
    except ValueError:
        port = -1
    if parts.scheme not in _SCHEMES or not parts.hostname or port == -1:
        raise ConfigError(
            f"--otlp-traces-endpoint {endpoint!r} is not a collector's URL: give one such as grpc://localhost:4317 or "
            "http://localhost:4318."
        )
    asked = next((value for name in _PROTOCOL if (value := os.environ.get(name))), None)
    protocol = asked or ("grpc" if parts.scheme == "grpc" or port == _GRPC_PORT else "http/protobuf")
    if protocol not in _PROTOCOLS:
        raise ConfigError(f"{_PROTOCOL[0]}={protocol!r} must be one of {', '.join(_PROTOCOLS)}.")
    if protocol == "grpc":
        return protocol, parts._replace(scheme="http" if parts.scheme == "grpc" else parts.scheme).geturl()
    if parts.scheme == "grpc":
        raise ConfigError(f"--otlp-traces-endpoint {endpoint}: {_PROTOCOL[0]} asks for {protocol}, not for gRPC.")
    return protocol, endpoint if parts.path.strip("/") else parts._replace(path=_HTTP_PATH).geturl()
