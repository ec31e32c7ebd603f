"""Settings of the HTTP server's logs and traces."""

from dataclasses import dataclass

from octavo.core import parsing, quantities
from octavo.core.flag import setting


@dataclass(frozen=True, slots=True, kw_only=True)
class LogConfig:
    """Logs and traces of the HTTP server."""

    log_stats_interval_s: float = setting(
        10.0,
        "time between log lines with throughput and load; 0 for none",
        flag="log-stats-interval",
        read=quantities.seconds,
        metavar="SECONDS",
        env="OCTAVO_LOG_STATS_INTERVAL",
    )
    disable_log_stats: bool = setting(False, "do not log throughput and load")
    log_level: str = setting(
        "info",
        "how much the server logs",
        read=str.lower,
        choices=("debug", "info", "warning", "error", "critical"),
        aliases=("uvicorn-log-level",),
        env="OCTAVO_LOGGING_LEVEL",
    )
    enable_log_requests: bool = setting(
        False,
        "log a line at the end of every request, not only of those that fail or are aborted; at log level debug its "
        "prompt, too",
        shown="only at log level debug",
    )
    otlp_traces_endpoint: str | None = setting(
        None, "collector that gets a trace of each request, over OpenTelemetry's protocol", metavar="URL"
    )
    enable_log_outputs: bool = setting(
        False, "with --enable-log-requests, also log what was generated; at log level debug its tokens, too"
    )
    enable_log_deltas: bool = setting(True, "with --enable-log-outputs, also log each piece of a stream as it comes")
    max_log_len: int | None = setting(
        None,
        "most characters or token ids of a prompt or an output that are logged",
        shown="no limit",
        read=quantities.natural,
        metavar="N",
    )
    log_config_file: str | None = setting(
        None,
        "JSON file for logging.config.dictConfig, in place of --log-level",
        metavar="FILE",
        env="OCTAVO_LOGGING_CONFIG_PATH",
    )
    configure_logging: bool = setting(
        True,
        "set up logging; --no-configure-logging leaves that to the program or the middleware around the server",
        env="OCTAVO_CONFIGURE_LOGGING",
    )
    disable_uvicorn_access_log: bool = setting(False, "at log level debug, do not log a line for each HTTP request")
    disable_access_log_for_endpoints: tuple[str, ...] = setting(
        (),
        "paths, separated by commas, whose HTTP requests are not logged at log level debug: /health,/metrics",
        read=parsing.paths,
        metavar="PATHS",
        many=False,
    )
