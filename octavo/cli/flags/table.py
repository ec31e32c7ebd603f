"""The flags of all settings, by the groups of `--help`, made from the settings' dataclasses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from msgspec.structs import replace

from octavo.config import CacheConfig, DeviceConfig, ModelConfig, ParallelConfig, SchedulerConfig, ServerConfig
from octavo.config.log import LogConfig
from octavo.core.flag import Flag, declared
from octavo.features import settings_types
from octavo.native import isa
from octavo.pool.settings import PoolConfig
from octavo.schedule.policy import POLICIES
from octavo.text.tools.formats import FORMATS

_NAMES: Mapping[str, Mapping[str, Any]] = {
    "scheduler.policy": {"choices": tuple(POLICIES)},
    "device.cpu_isa": {"choices": ("auto", *isa.NAMES)},
    "server.tool_call_parser": {
        "help": f"how the model writes tool calls: auto (by its chat template), {', '.join(FORMATS)}"
    },
}
"""Target -> what depends on names that the settings' modules don't import."""


def _flags(section: str, kind: type[Any]) -> tuple[Flag, ...]:
    return tuple(replace(flag, **_NAMES.get(flag.target, {})) for flag in declared(section, kind).values())


_LOG = {f"server.{field.name}" for field in fields(LogConfig)}
_SERVER = _flags("server", ServerConfig)

ENGINE_GROUPS: Mapping[str, tuple[Flag, ...]] = {
    "model": _flags("model", ModelConfig),
    "KV cache": _flags("cache", CacheConfig),
    "scheduling": _flags("scheduler", SchedulerConfig),
    "device": _flags("device", DeviceConfig),
    "several devices": _flags("parallel", ParallelConfig),
    "features": tuple(flag for name, kind in settings_types().items() for flag in _flags(name, kind)),
}
SERVER_GROUPS: Mapping[str, tuple[Flag, ...]] = {
    "HTTP server": tuple(flag for flag in _SERVER if flag.target not in _LOG),
    "log": tuple(flag for flag in _SERVER if flag.target in _LOG),
}

POOL_GROUPS: Mapping[str, tuple[Flag, ...]] = {"several models": _flags("pool", PoolConfig)}
"""Only of `octavo serve`."""


def flags_of(*groups: Mapping[str, tuple[Flag, ...]]) -> tuple[Flag, ...]:
    return tuple(flag for group in groups for flags in group.values() for flag in flags)
