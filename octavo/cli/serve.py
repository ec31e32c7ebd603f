"""`octavo serve`: a model behind an HTTP server that OpenAI's clients understand."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any

from octavo.cli.flags.args import add_engine_settings, add_settings, engine_from, server_from, values
from octavo.cli.flags.environment import notices
from octavo.cli.flags.parser import OctavoParser
from octavo.cli.flags.table import ENGINE_GROUPS, SERVER_GROUPS, flags_of
from octavo.cli.start import open_frontend
from octavo.config import EngineConfig, ServerConfig
from octavo.core.log import FORM
from octavo.core.terminal import say, write_line
from octavo.hub.catalogue import CATALOGUE


def run(argv: list[str]) -> int:
    parser = make_parser()
    found = values(parser, parser.parse_args(argv))
    refuse_swallowed_model(parser, found)
    for line in notices(os.environ, {flag.env for flag in flags_of(ENGINE_GROUPS, SERVER_GROUPS) if flag.env}):
        say(line)
    engine, server = engine_from(found), server_from(found)
    if engine.parallel.node_rank:
        return run_ranks(engine, server)
    from octavo.server.process.run import run_server

    return run_server(lambda: open_frontend(engine, server), server, announce=announce)


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
        words="[MODEL]",
        description="Serve a model over HTTP. When it is ready, it prints its address and a curl command to try.",
    )
    add_engine_settings(parser)
    add_settings(parser, SERVER_GROUPS)
    return parser
