"""`octavo serve`: a model behind an HTTP server that OpenAI's clients understand."""

from __future__ import annotations

from octavo.cli.args import add_engine_settings, add_settings, engine_from, server_from, values
from octavo.cli.flags import SERVER_GROUPS
from octavo.cli.parser import OctavoParser
from octavo.cli.start import open_frontend


def run(argv: list[str]) -> int:
    parser = make_parser()
    found = values(parser, parser.parse_args(argv))
    engine, server = engine_from(found), server_from(found)
    from octavo.server.run import run_server

    return run_server(lambda: open_frontend(engine, server), server, announce=announce)


def announce(text: str) -> None:
    """To standard output at once, for whoever waits for it there may be a pipe away."""
    print(text, flush=True)


def make_parser() -> OctavoParser:
    parser = OctavoParser(
        "octavo serve",
        words="[MODEL]",
        description="Serve a model over HTTP. Ends in a line with the address and a curl command to try.",
    )
    add_engine_settings(parser)
    add_settings(parser, SERVER_GROUPS)
    return parser
