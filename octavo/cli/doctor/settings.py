"""The settings that were given: whether they can be used together, and the files that they name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from octavo.cli.doctor.check import Area, Check, Finding, Wish, broken, fine
from octavo.core.errors import ConfigError
from octavo.schedule.policy import make_policy
from octavo.server.fingerprint import check_fingerprint
from octavo.server.process.keys import with_key_file
from octavo.server.process.tls import check_tls


@dataclass(frozen=True, slots=True)
class Settings:
    """Why the settings are refused, each reason a text."""

    problems: tuple[str, ...]


def read(wish: Wish) -> Settings:
    engine, server = wish.engine, wish.server
    checks: tuple[Callable[[], object], ...] = (
        engine.check,
        lambda: make_policy(engine.scheduler.policy, engine.scheduler.tenant_weights),
        server.check,
        lambda: with_key_file(server),
        lambda: check_tls(server),
        lambda: check_fingerprint(server),
    )
    problems = []
    for check in checks:
        try:
            check()
        except ConfigError as error:
            problems.append(str(error))
    return Settings(tuple(problems))


def judge(found: Settings) -> Finding:
    if found.problems:
        return broken(" ".join(found.problems), "change these flags, or leave them out: docs/configuration.md")
    return fine("they can be used together")


AREA = Area("settings", read, (Check("flags", judge),))
