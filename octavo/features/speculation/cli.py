"""`octavo spec-train`. The list of commands reads this module, so it imports nothing heavy."""

from __future__ import annotations

NAME = "spec-train"
ABOUT = "train a small head that drafts for a model (EAGLE)"


def run(argv: list[str]) -> int:
    """Train a head. Return the exit status."""
    from octavo.features.speculation.eagle import command

    return command.run(argv)
