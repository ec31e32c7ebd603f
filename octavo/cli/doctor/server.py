"""The server's address, and proxies between it and clients on this machine."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.request import getproxies, proxy_bypass

from octavo.cli.doctor.check import Area, Check, Finding, Wish, broken, fine, warning
from octavo.core.errors import ConfigError
from octavo.server.process.address import bind, release

_LOCAL = "127.0.0.1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Door:
    """Where the server will listen.

    Attributes:
        address: as set.
        problem: why it can't listen there; "" if it can.
        stated: the address was given.
        proxy: that which clients on this machine would ask for 127.0.0.1; "" for none.
    """

    address: str
    problem: str = ""
    stated: bool = False
    proxy: str = ""


def read(wish: Wish) -> Door:
    config = wish.server
    proxy = getproxies().get("http", "")
    return Door(
        address=config.uds or f"{config.host}:{config.port}",
        problem=_problem(wish),
        stated=wish.has_address,
        proxy="" if not proxy or proxy_bypass(_LOCAL) else proxy,
    )


def _problem(wish: Wish) -> str:
    try:
        bind(wish.server).close()
    except ConfigError as error:
        return str(error)
    release(wish.server)
    return ""


def judge_address(found: Door) -> Finding:
    if found.problem:
        remedy = "ss -ltnp shows what listens there: if it is not your server, take another port with --port"
        return (broken if found.stated else warning)(found.problem, remedy)
    return fine(f"{found.address} is free")


def judge_proxy(found: Door) -> Finding | None:
    if not found.proxy:
        return None
    return warning(
        f"clients on this machine ask the proxy {found.proxy} for {_LOCAL}, too, so they don't reach the server",
        f"export no_proxy={_LOCAL},localhost",
    )


AREA = Area("server", read, (Check("address", judge_address), Check("proxy", judge_proxy)))
