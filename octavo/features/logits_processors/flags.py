"""Flags of custom logits processors."""

from __future__ import annotations

from octavo.cli.flags.flag import Flag

FLAGS = (
    Flag(
        "logits-processors",
        "logits_processors.logits_processors",
        "your own code that changes logits before sampling, each as module:Class",
        "those of installed packages",
        many=True,
        metavar="MODULE:CLASS",
    ),
)
