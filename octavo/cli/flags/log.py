"""The flags for logging."""

from __future__ import annotations

from octavo.cli.flags import units
from octavo.cli.flags.flag import Flag

LOG = (
    Flag(
        "log-stats-interval",
        "server.log_stats_interval_s",
        "time between log lines with throughput and load; 0 for none",
        "10",
        units.seconds,
        metavar="SECONDS",
        env="OCTAVO_LOG_STATS_INTERVAL",
    ),
    Flag("disable-log-stats", "server.disable_log_stats", "do not log throughput and load", "off", switch=True),
    Flag(
        "log-level",
        "server.log_level",
        "how much the server logs",
        "info",
        str.lower,
        choices=("debug", "info", "warning", "error", "critical"),
        aliases=("uvicorn-log-level",),
        env="OCTAVO_LOGGING_LEVEL",
    ),
    Flag(
        "enable-log-requests",
        "server.enable_log_requests",
        "log a line at the end of every request; at log level debug its prompt, too",
        "only at log level debug",
        switch=True,
    ),
    Flag(
        "otlp-traces-endpoint",
        "server.otlp_traces_endpoint",
        "collector that gets a trace of each request, over OpenTelemetry's protocol",
        "none",
        metavar="URL",
    ),
    Flag(
        "enable-log-outputs",
        "server.enable_log_outputs",
        "with --enable-log-requests, also log what was generated; at log level debug its tokens, too",
        "off",
        switch=True,
    ),
    Flag(
        "enable-log-deltas",
        "server.enable_log_deltas",
        "with --enable-log-outputs, also log each piece of a stream as it comes",
        "on",
        switch=True,
    ),
    Flag(
        "max-log-len",
        "server.max_log_len",
        "characters or token ids of a prompt or an output that are logged",
        "no limit",
        units.natural,
        metavar="N",
    ),
    Flag(
        "log-config-file",
        "server.log_config_file",
        "JSON file for logging.config.dictConfig, in place of --log-level",
        "none",
        metavar="FILE",
        env="OCTAVO_LOGGING_CONFIG_PATH",
    ),
    Flag(
        "configure-logging",
        "server.configure_logging",
        "set up logging at all; without, that is left to the program or the middleware around the server",
        "on",
        switch=True,
        env="OCTAVO_CONFIGURE_LOGGING",
    ),
    Flag(
        "disable-uvicorn-access-log",
        "server.disable_uvicorn_access_log",
        "no line for each HTTP request at log level debug",
        "off",
        switch=True,
    ),
    Flag(
        "disable-access-log-for-endpoints",
        "server.disable_access_log_for_endpoints",
        "paths, separated by commas, whose HTTP requests get no such line: /health,/metrics",
        "none",
        units.paths,
        metavar="PATHS",
    ),
)
