"""Settings of a server of several models."""

from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from octavo.config import EngineConfig, ServerConfig
from octavo.core import quantities
from octavo.core.errors import ConfigError
from octavo.core.flag import setting


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolConfig:
    """A server of several models. Times are in seconds."""

    models: str | None = setting(
        None, "YAML file with the models to serve: names, and settings of each (docs/several-models.md)", metavar="FILE"
    )
    max_loaded_models: int = setting(
        1,
        "of several models, how many may be loaded at once; they divide the device's memory",
        read=quantities.count,
        metavar="N",
    )
    model_eviction: Literal["auto", "sleep", "stop"] = setting(
        "auto",
        "what happens to a model when another needs its memory: sleep keeps its process, and its weights in the host's "
        "memory; stop ends the process; auto is sleep on a GPU and stop on a CPU",
    )
    max_sleeping_models: int = setting(
        4,
        "most models that sleep, each with its weights in the host's memory; beyond that the least recently used is "
        "stopped",
        read=quantities.natural,
        metavar="N",
    )
    min_model_turn_s: float = setting(
        10.0,
        "least time for which a model in use stays loaded while requests wait for another one",
        flag="min-model-turn",
        read=quantities.seconds,
        metavar="SECONDS",
    )
    model_wait_timeout_s: float = setting(
        300.0,
        "how long a request may wait until its model is loaded; after it, the request gets a 503",
        flag="model-wait-timeout",
        read=quantities.duration,
        metavar="SECONDS",
    )
    model_idle_timeout_s: float = setting(
        0.0,
        "unload a model that has had no request for this long; 0 for never",
        flag="model-idle-timeout",
        read=quantities.seconds,
        metavar="SECONDS",
    )
    preload_models: bool = setting(
        False, "load models at the start, as many as may be loaded; otherwise a model is loaded at its first request"
    )

    def check(self) -> None:
        """Raise ConfigError if models are to sleep and must not, or the other way round."""
        sleeps, most = self.model_eviction != "stop", self.max_sleeping_models
        if not sleeps and most not in (0, PoolConfig().max_sleeping_models):
            raise ConfigError(
                f"--max-sleeping-models {most} has no effect with --model-eviction stop, with which no model sleeps. "
                "Leave one of them out."
            )
        if self.model_eviction == "sleep" and most == 0:
            raise ConfigError(
                "--model-eviction sleep needs room for a model that sleeps: raise --max-sleeping-models, or leave it "
                "out."
            )

    def check_unused(self) -> None:
        """Raise ConfigError if a setting is given although there is one model."""
        plain = PoolConfig()
        for one in fields(self):
            if getattr(self, one.name) != getattr(plain, one.name):
                name = (one.metadata["flag"].name or one.name).replace("_", "-")
                raise ConfigError(
                    f"--{name} is for several models, and one is given. Name more of them (octavo serve MODEL MODEL "
                    f"...) or a file (--models FILE), or leave --{name} out."
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelEntry:
    """One model of the server.

    Attributes:
        names: by which requests may name it; the first is its own.
        added: names of models that its settings add to it, such as adapters.
        engine, server: the settings of its process.
    """

    names: tuple[str, ...]
    added: tuple[str, ...]
    engine: EngineConfig
    server: ServerConfig

    @property
    def name(self) -> str:
        return self.names[0]


_APPLIED = (
    *("host", "port", "uds", "api_keys", "api_key_file", "middleware", "max_concurrent_requests"),
    *("ssl_certfile", "ssl_keyfile", "ssl_keyfile_password", "ssl_ca_certs", "ssl_cert_reqs", "ssl_ciphers"),
    *("enable_ssl_refresh", "allowed_origins", "allowed_methods", "allowed_headers", "allow_credentials"),
)
"""Settings that the front process has applied when a request reaches a model's process."""
OF_THE_FRONT = frozenset(
    {
        *_APPLIED,
        *("root_path", "api_server_count", "tenant_by", "keep_alive_s", "unread_timeout_s", "shutdown_timeout_s"),
        *("max_body_bytes", "body_timeout_s", "jobs_dir", "max_file_bytes", "max_batch_lines", "batch_concurrency"),
        *("enable_docs", "server_dev_mode", "log_level", "log_config_file", "configure_logging"),
        *("otlp_traces_endpoint", "skip_model_name_validation"),
        *("disable_uvicorn_access_log", "disable_access_log_for_endpoints"),
    }
)
"""Fields of `ServerConfig` that hold for the whole server, so that a model can't have its own."""


def of_child(entry: ModelEntry, socket: str, jobs_dir: str) -> ServerConfig:
    """Return the server settings of a model's process.

    Args:
        socket: the socket file on which it listens.
        jobs_dir: the front process has the files and batches; this folder stays empty.
    """
    plain = ServerConfig()
    own: dict[str, Any] = {name: getattr(plain, name) for name in _APPLIED}
    own |= {"uds": socket, "jobs_dir": jobs_dir, "served_model_name": entry.names}
    # At a stop the front process waits for the requests; what is left when it stops the models is aborted.
    return replace(entry.server, **own, shutdown_timeout_s=0.0, enable_docs=True)
