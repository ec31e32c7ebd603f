"""Flags of structured output."""

from __future__ import annotations

from octavo.cli.flags import units
from octavo.cli.flags.flag import Flag

FLAGS = (
    Flag(
        "structured-outputs-config",
        "grammar.structured_outputs_config",
        'defaults for the JSON of all structured outputs: {"disable_any_whitespace": true}, '
        '{"disable_additional_properties": true}',
        "{}",
        units.json_object,
        metavar="JSON",
    ),
)
