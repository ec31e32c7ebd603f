"""Where the log goes: what the settings and their file say, in whichever process."""

from __future__ import annotations

import json
import logging
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from octavo.config import ServerConfig
from octavo.core.errors import ConfigError
from octavo.server.process.log import log_settings, silent_access, uvicorn_log

PROGRAM = """
import logging, pickle, sys
logging.getLogger("octavo.early")
pickle.load(sys.stdin.buffer).set_up("FORM %(message)s")
logging.getLogger("octavo.early").info("one")
logging.getLogger("octavo.server").warning("two")
"""


def written(config: ServerConfig) -> str:
    """What a process of its own writes to standard error that logs by these settings."""
    told = pickle.dumps(log_settings(config))
    return subprocess.run([sys.executable, "-c", PROGRAM], input=told, capture_output=True, check=True).stderr.decode()


def tables(target: Path) -> dict[str, Any]:
    handler = {"class": "logging.FileHandler", "filename": str(target)}
    return {"version": 1, "handlers": {"file": handler}, "loggers": {"octavo": {"handlers": ["file"], "level": "INFO"}}}


def in_file(path: Path, content: Any) -> str:
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return str(path)


def test_by_default_it_goes_to_standard_error() -> None:
    assert written(ServerConfig()) == "FORM one\nFORM two\n"
    assert written(ServerConfig(log_level="warning")) == "FORM two\n"


def test_it_may_be_left_alone() -> None:
    assert written(ServerConfig(configure_logging=False)) == "two\n"  # what Python does by itself


def test_a_file_says_where_it_goes(tmp_path: Path) -> None:
    config = in_file(tmp_path / "log.json", tables(tmp_path / "out.log"))
    assert written(ServerConfig(log_config_file=config)) == ""
    assert (tmp_path / "out.log").read_text() == "one\ntwo\n"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "can't be read: No such file"),
        ("{", "is not valid JSON"),
        ("[]", "must hold a JSON object"),
        ({"version": 2}, "Unsupported version"),
        ({"version": 1, "handlers": {"h": {"class": "logging.Nothing"}}}, "'h'.*Nothing"),
    ],
)
def test_a_file_that_is_no_use_is_refused(tmp_path: Path, content: Any, said: str) -> None:
    path = tmp_path / "log.json"
    if content is not None:
        in_file(path, content)
    with pytest.raises(ConfigError, match=f"--log-config-file {path}.*{said}"):
        log_settings(ServerConfig(log_config_file=str(path))).set_up("")


def test_a_file_that_would_not_be_read_is_refused(tmp_path: Path) -> None:
    path = in_file(tmp_path / "log.json", {"version": 1})
    with pytest.raises(ConfigError, match="leave one of them out"):
        log_settings(ServerConfig(log_config_file=path, configure_logging=False))


def test_requests_get_lines_at_the_level_debug_or_if_the_file_says_so(tmp_path: Path) -> None:
    def lines(**settings: Any) -> bool:
        told: bool = uvicorn_log(ServerConfig(**settings))["access_log"]
        return told

    assert not lines()
    assert lines(log_level="debug")
    assert not lines(log_level="debug", disable_uvicorn_access_log=True)
    plain = in_file(tmp_path / "plain.json", {"version": 1})
    named = in_file(tmp_path / "named.json", {"version": 1, "loggers": {"uvicorn.access": {"level": "INFO"}}})
    assert not lines(log_level="debug", log_config_file=plain)
    assert lines(log_config_file=named)
    assert uvicorn_log(ServerConfig(log_config_file=named))["log_level"] is None


def test_some_paths_get_no_lines(caplog: pytest.LogCaptureFixture) -> None:
    access = logging.getLogger("uvicorn.access")

    def visit(path: str) -> None:
        access.info('%s - "%s %s HTTP/%s" %d', "127.0.0.1:1", "GET", path, "1.1", 200)

    with caplog.at_level(logging.INFO, "uvicorn.access"):
        access.addHandler(caplog.handler)  # uvicorn may have turned propagation off
        try:
            with silent_access(["/health", "/metrics"]):
                for path in ("/health", "/metrics?x=1", "/healthy", "/v1/models"):
                    visit(path)
            visit("/health")
        finally:
            access.removeHandler(caplog.handler)
    heard = list(dict.fromkeys(record.getMessage().split()[3] for record in caplog.records))
    assert heard == ["/healthy", "/v1/models", "/health"]
