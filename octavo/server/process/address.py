"""The server's listening address: a port or a Unix socket, bound before anything is loaded."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import stat

from octavo.config import ServerConfig
from octavo.core.errors import ConfigError
from octavo.server.process.tls import serves_tls


def bind(config: ServerConfig) -> socket.socket:
    """Bind a socket to the configured address, not yet listening. Port 0 selects a free port.

    Raises:
        ConfigError: the address is not available; the text gives the reason and the flag to change.
    """
    if config.uds is not None:
        return _bind_path(config.uds)
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except socket.gaierror as exc:
        raise ConfigError(f"{config.host!r} is not an address to listen on ({exc.strerror}); change --host.") from exc
    sock = socket.socket(family, kind, proto)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except OSError as exc:
        sock.close()
        raise ConfigError(_why_not_bound(config, exc)) from exc
    return sock


def bind_all(config: ServerConfig) -> list[socket.socket]:
    """Bind a socket for each API process to one address; the system distributes the connections among them.

    If that is impossible (a socket file), there is one socket, from which all processes accept.

    Raises:
        ConfigError: as `bind`; or the system does not support shared ports.
    """
    first = bind(config)
    if config.api_server_count == 1 or config.uds is not None:
        return [first]
    if not hasattr(socket, "SO_REUSEPORT"):
        first.close()
        raise ConfigError("This system can't share a port between processes; use --uds, or --api-server-count 1.")
    # The first bind ensured that the address is free: sockets with SO_REUSEPORT would join another server's.
    family, address = first.family, first.getsockname()
    first.close()
    socks: list[socket.socket] = []
    try:
        for _ in range(config.api_server_count):
            socks.append(socket.socket(family, socket.SOCK_STREAM))
            socks[-1].setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            socks[-1].setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            socks[-1].bind(address)
    except OSError as exc:
        for sock in socks:
            sock.close()
        raise ConfigError(_why_not_bound(config, exc)) from exc
    return socks


def check_alone(config: ServerConfig, sock: socket.socket) -> None:
    """Check that no other server listens on the address; binding a shared port does not fail by itself.

    Raises:
        ConfigError: another server has bound it meanwhile.
    """
    if config.uds is not None:
        return
    with socket.socket(sock.family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(sock.getsockname())
        except OSError as exc:
            raise ConfigError(_why_not_bound(config, exc)) from exc


def release(config: ServerConfig) -> None:
    """Remove the files that `bind` creates."""
    if config.uds is not None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(config.uds)


def base_url(config: ServerConfig, sock: socket.socket) -> str:
    """Return the address for clients on this machine."""
    scheme = "https" if serves_tls(config) else "http"
    if config.uds is not None:
        return f"{scheme}://localhost"
    host, port = sock.getsockname()[:2]
    if host in ("0.0.0.0", "::"):
        host = "127.0.0.1"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def _bind_path(path: str) -> socket.socket:
    """Bind a socket file; replace one left by an earlier server."""
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISSOCK(os.stat(path).st_mode):
            raise ConfigError(f"{path} exists and is not a socket; give another path with --uds.")
        if _answers(path):
            raise ConfigError(f"A server already listens on {path}; stop it, or give another path with --uds.")
        os.unlink(path)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.bind(path)
    except OSError as exc:
        sock.close()
        raise ConfigError(f"Can't listen on {path}: {exc.strerror or exc}. Change --uds.") from exc
    return sock


def _answers(path: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1)
        return probe.connect_ex(path) == 0


def _why_not_bound(config: ServerConfig, exc: OSError) -> str:
    where = f"{config.host}:{config.port}"
    if exc.errno == errno.EADDRINUSE:
        return f"Port {config.port} is in use ({where}); stop what listens there, or choose another with --port."
    if exc.errno == errno.EACCES:
        return f"Port {config.port} may not be used without privileges; choose one above 1023 with --port."
    if exc.errno == errno.EADDRNOTAVAIL:
        return f"{config.host} is not an address of this machine; change --host."
    return f"Can't listen on {where}: {exc.strerror}. Change --host or --port."
