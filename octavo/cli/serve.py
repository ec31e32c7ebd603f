"""`octavo serve`: a model, or several, behind an HTTP server that OpenAI's clients understand."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from octavo.cli.flags.args import (
    MODEL_HELP,
    add_engine_settings,
    add_settings,
    engine_from,
    server_from,
    values,
)
from octavo.cli.flags.environment import notices
from octavo.cli.flags.parser import OctavoParser
from octavo.cli.flags.table import ENGINE_GROUPS, POOL_GROUPS, SERVER_GROUPS, flags_of
from octavo.cli.start import open_frontend
from octavo.config import EngineConfig, ServerConfig
from octavo.core.log import FORM
from octavo.core.terminal import say, write_line
from octavo.hub.catalogue import CATALOGUE
from octavo.pool.settings import PoolConfig


def run(argv: list[str]) -> int:
    parser = make_parser()
    args = parser.parse_args(argv)
    models: list[str] = args.model_names
    args.model_name = models[0] if len(models) == 1 else None
    found = values(parser, args)
    if len(models) < 2:
        refuse_swallowed_model(parser, found)
    for line in notices(os.environ, {flag.env for flag in flags_of(ENGINE_GROUPS, SERVER_GROUPS) if flag.env}):
        say(line)
    if len(models) > 1 or "pool.models" in found:
        return run_models(parser, models, found)
    pool_from(found).check_unused()
    engine, server = engine_from(found), server_from(found)
    if engine.parallel.node_rank:
        return run_ranks(engine, server)
    from octavo.server.process.run import run_server

    return run_server(lambda: open_frontend(engine, server), server, announce=announce)


def run_models(parser: OctavoParser, models: Sequence[str], found: Mapping[str, Any]) -> int:
    """Serve several models, each in a process of its own."""
    from octavo.cli.serve_models import CHILD, entries
    from octavo.pool.run import run_pool

    pool = pool_from(found)
    pool.check()
    return run_pool(entries(parser, models, found), pool, server_from(found), CHILD, announce)


def pool_from(found: Mapping[str, Any]) -> PoolConfig:
    """Return `PoolConfig` with the given settings, and defaults elsewhere."""
    own = {target.removeprefix("pool."): value for target, value in found.items() if target.startswith("pool.")}
    return PoolConfig(**own)


def run_ranks(engine: EngineConfig, server: ServerConfig) -> int:
    """Run the ranks of a machine without an engine, until the engine ends."""
    from octavo.build_worker import serve_ranks
    from octavo.server.process.log import log_settings
    from octavo.text.sources import model_files

    log_settings(server).set_up(FORM)
    return serve_ranks(engine, model_files(engine.model, weights=engine.needs_weights))


def refuse_swallowed_model(parser: OctavoParser, found: Mapping[str, Any]) -> None:
    """Exit if no model was given and a flag with several values ends in one: `--api-key KEY MODEL` takes both."""
    if "model.model" in found:
        return
    for flag in flags_of(SERVER_GROUPS):
        given: tuple[str, ...] = found.get(flag.target, ()) if flag.many else ()
        if len(given) > 1 and (given[-1] in CATALOGUE or os.path.exists(given[-1])):
            parser.error(
                f"--{flag.name} takes all values that follow it, {given[-1]!r} too; put the model first: "
                f"octavo serve {given[-1]} --{flag.name} ..."
            )


def announce(text: str) -> None:
    """Write a line to standard output at once, for processes that read it through a pipe."""
    write_line(text, sys.stdout)


def make_parser() -> OctavoParser:
    parser = OctavoParser(
        "octavo serve",
        words="[MODEL ...]",
        description="Serve a model over HTTP, or several (docs/several-models.md). When the server is ready, it prints "
        "its address and what to try.",
    )
    parser.add_argument("model_names", nargs="*", metavar="MODEL", help=f"{MODEL_HELP}; several share one address")
    add_engine_settings(parser, positional=False)
    add_settings(parser, SERVER_GROUPS)
    add_settings(parser, POOL_GROUPS)
    return parser
