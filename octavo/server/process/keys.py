"""API keys in a file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from octavo.config import ServerConfig
from octavo.core.errors import ConfigError


def with_key_file(config: ServerConfig) -> ServerConfig:
    """Return the settings with the keys of `api_key_file`: one per line, without empty lines and # comments.

    Raises:
        ConfigError: the file can't be read, or has no key.
    """
    if config.api_key_file is None:
        return config
    path = Path(config.api_key_file).expanduser()
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(f"--api-key-file {path} can't be read: {exc}.") from exc
    keys = tuple(line for line in lines if line and not line.startswith("#"))
    if not keys:
        raise ConfigError(
            f"--api-key-file {path} holds no key, which would open the server to everyone; write one key per line."
        )
    return replace(config, api_keys=(*config.api_keys, *keys))
