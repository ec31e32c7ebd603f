"""Flags of vectors."""

from __future__ import annotations

from octavo.cli.flags import units
from octavo.cli.flags.flag import Flag

FLAGS = (
    Flag(
        "pooler-config",
        "pooling.pooler_config",
        'how embeddings are pooled, overriding the model, as JSON: {"pooling_type": "MEAN", "normalize": true}',
        "{}",
        units.json_object,
        metavar="JSON",
        aliases=("override-pooler-config",),
    ),
)
