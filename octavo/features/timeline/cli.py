"""`octavo why`. The list of commands reads this module, so it imports nothing heavy."""

from __future__ import annotations

NAME = "why"
ABOUT = "say why a request of a running server takes or took so long"


def run(argv: list[str]) -> int:
    """Ask the server and print its answer. Return the exit status."""
    from octavo.features.timeline import command

    return command.run(argv)
