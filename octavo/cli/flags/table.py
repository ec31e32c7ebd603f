"""The settings' flags: one table from which the command line, the config file, the help and the docs are made."""

from __future__ import annotations

from collections.abc import Mapping

from octavo.cli.flags.engine import CACHE, DEVICE, MODEL, SCHEDULING
from octavo.cli.flags.flag import Flag
from octavo.cli.flags.log import LOG
from octavo.cli.flags.server import SERVER
from octavo.features import parts

ENGINE_GROUPS: Mapping[str, tuple[Flag, ...]] = {
    "model": MODEL,
    "KV cache": CACHE,
    "scheduling": SCHEDULING,
    "device": DEVICE,
    "features": tuple(flag for _, module in parts("flags") for flag in module.FLAGS),
}
SERVER_GROUPS: Mapping[str, tuple[Flag, ...]] = {"HTTP server": SERVER, "log": LOG}


def flags_of(*groups: Mapping[str, tuple[Flag, ...]]) -> tuple[Flag, ...]:
    return tuple(flag for group in groups for flags in group.values() for flag in flags)
