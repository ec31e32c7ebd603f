"""TLS: the certificate files, checked before anything is loaded, and reloaded when they change."""

from __future__ import annotations

import asyncio
import logging
import os
import ssl

from octavo.config import ServerConfig
from octavo.core.errors import ConfigError

logger = logging.getLogger("octavo.server")

_LOOK_S = 10.0


def serves_tls(config: ServerConfig) -> bool:
    return config.ssl_certfile is not None


def check_tls(config: ServerConfig) -> None:
    """Check the TLS settings.

    Raises:
        ConfigError: a file is missing, invalid, or does not match the others; the text names its flag.
    """
    others = ("ssl_keyfile", "ssl_keyfile_password", "ssl_ca_certs", "ssl_ciphers")
    if config.ssl_certfile is None:
        given = next((name for name in others if getattr(config, name) is not None), None)
        if given is not None or config.ssl_cert_reqs or config.enable_ssl_refresh:
            name = (given or ("ssl_cert_reqs" if config.ssl_cert_reqs else "enable_ssl_refresh")).replace("_", "-")
            raise ConfigError(f"--{name} needs --ssl-certfile, the server's certificate.")
        return
    if config.ssl_cert_reqs and config.ssl_ca_certs is None:
        raise ConfigError("--ssl-cert-reqs needs --ssl-ca-certs: the authorities that sign client certificates.")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    load_certificate(context, config)
    if config.ssl_ca_certs is not None:
        try:
            context.load_verify_locations(config.ssl_ca_certs)
        except (OSError, ssl.SSLError) as exc:
            raise ConfigError(f"--ssl-ca-certs {config.ssl_ca_certs}: {_reason(exc)}") from exc
    if config.ssl_ciphers is not None:
        try:
            context.set_ciphers(config.ssl_ciphers)
        except ssl.SSLError as exc:
            raise ConfigError(f"--ssl-ciphers {config.ssl_ciphers!r}: no such cipher is known.") from exc


def load_certificate(context: ssl.SSLContext, config: ServerConfig) -> None:
    """Load the certificate and its key.

    Raises:
        ConfigError: the certificate or its key is invalid.
    """
    assert config.ssl_certfile is not None
    try:
        # Without a callback, OpenSSL would prompt for a missing password on the terminal.
        context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile, lambda: config.ssl_keyfile_password or "")
    except (OSError, ssl.SSLError) as exc:
        files = f"--ssl-certfile {config.ssl_certfile}"
        files += f" and --ssl-keyfile {config.ssl_keyfile}" if config.ssl_keyfile else ""
        raise ConfigError(f"{files}: {_reason(exc)}") from exc


async def refresh(context: ssl.SSLContext, config: ServerConfig, look_s: float = _LOOK_S) -> None:
    """Watch the certificate files forever; new connections use changed ones. An invalid file is ignored."""
    seen = _stamps(config)
    while True:
        await asyncio.sleep(look_s)
        now = _stamps(config)
        if now == seen:
            continue
        seen = now
        try:
            load_certificate(context, config)
        except ConfigError as exc:
            logger.error("The certificate has changed and can't be used; the previous one stays in use. %s", exc)
        else:
            logger.info("The certificate has changed and was reloaded.")


def _stamps(config: ServerConfig) -> list[tuple[int, int] | None]:
    return [_stamp(path) for path in (config.ssl_certfile, config.ssl_keyfile) if path is not None]


def _stamp(path: str) -> tuple[int, int] | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size


def _reason(exc: OSError) -> str:
    if isinstance(exc, ssl.SSLError):
        if exc.reason == "KEY_VALUES_MISMATCH":
            return "the key does not belong to the certificate."
        return f"not usable ({exc.reason or 'no PEM file'}); a PEM file is expected."
    return f"{exc.strerror or exc}."
