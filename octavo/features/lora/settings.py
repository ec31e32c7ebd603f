"""Settings of LoRA adapters."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.core import quantities
from octavo.core.errors import ConfigError
from octavo.core.flag import setting
from octavo.features import FeatureSettings

HIGHEST_RANK = 256
_MOST_ON_DEVICE, _RANK = 256, 64
"""Defaults."""
_ENABLED_ONLY = "max_loras", "max_lora_rank", "max_cpu_loras", "lora_extra_vocab_size", "allow_runtime_lora_updating"
"""Settings without effect unless there are adapters."""
_KEYS = {"name", "path", "base_model_name"}


@dataclass(frozen=True, slots=True)
class LoraModule:
    """An adapter that the settings name.

    Attributes:
        base_model_name: shown as its parent; None for the served model.
    """

    name: str
    path: Path
    base_model_name: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraSettings(FeatureSettings):
    """Settings of LoRA adapters.

    Attributes:
        lora_modules: each `name=path`, an object with `name`, `path` and `base_model_name`, or a list of these; as
            JSON, too.
        max_loras, max_lora_rank, max_cpu_loras: None for the default; `most_on_device`, `highest_rank` and
            `most_on_host` are what holds.

    Raises:
        ConfigError: an adapter is not given in one of these forms, a number is out of range, or a setting is given that
            has no effect without adapters. It does not enable them: a server that knows no adapter would answer
            their requests with 404.
    """

    enable_lora: bool = setting(False, "serve LoRA adapters of the model; implied by --lora-modules and --lora-dir")
    lora_modules: tuple[Any, ...] = setting(
        (),
        'adapters to register at the start, each as NAME=PATH or as JSON: {"name": "a", "path": "/a", '
        '"base_model_name": "b"}',
        metavar="NAME=PATH",
    )
    lora_dir: str | None = setting(
        None, "a folder of adapters, found on demand: requests name the folders in it", metavar="FOLDER"
    )
    max_loras: int | None = setting(
        None,
        "most adapters in the device's memory at once; they take blocks of the KV cache only while they are there",
        shown=str(_MOST_ON_DEVICE),
        read=quantities.count,
        metavar="N",
    )
    max_lora_rank: int | None = setting(
        None,
        f"largest rank of an adapter, up to {HIGHEST_RANK}",
        shown=str(_RANK),
        read=quantities.count,
        metavar="RANK",
    )
    max_cpu_loras: int | None = setting(
        None, "most adapters kept in the host's memory", shown="--max-loras", read=quantities.count, metavar="N"
    )
    lora_extra_vocab_size: int = setting(
        0,
        "most tokens that an adapter may add to the vocabulary; only with one rank, and without drafts",
        read=quantities.natural,
        metavar="N",
    )
    allow_runtime_lora_updating: bool = setting(
        False,
        "let clients load adapters from the server's files, and unload them (/v1/load_lora_adapter)",
        env="OCTAVO_ALLOW_RUNTIME_LORA_UPDATING",
    )

    def __post_init__(self) -> None:
        if self.highest_rank > HIGHEST_RANK:
            raise ConfigError(f"max_lora_rank={self.max_lora_rank} must be at most {HIGHEST_RANK}.")
        if self.lora_extra_vocab_size < 0:
            raise ConfigError(f"lora_extra_vocab_size={self.lora_extra_vocab_size} must be at least 0.")
        if self.enabled:
            self.modules()
            return
        idle = next((name for name in _ENABLED_ONLY if getattr(self, name)), None)
        if idle is not None:
            raise ConfigError(
                f"{idle}={getattr(self, idle)} has no effect without adapters. Set --enable-lora, --lora-modules or "
                f"--lora-dir, or leave out --{idle.replace('_', '-')}."
            )

    @property
    def enabled(self) -> bool:
        return self.enable_lora or bool(self.lora_modules) or self.lora_dir is not None

    @property
    def most_on_device(self) -> int:
        return self.max_loras or _MOST_ON_DEVICE

    @property
    def most_on_host(self) -> int:
        return self.max_cpu_loras or self.most_on_device

    @property
    def highest_rank(self) -> int:
        return self.max_lora_rank or _RANK

    def check_recordable(self) -> None:
        if self.enabled:
            raise ConfigError(
                "--record-steps can't be used with adapters, since a replay would not have their weights. Leave out "
                "one of them."
            )

    @property
    def model_names(self) -> tuple[str, ...]:
        return tuple(module.name for module in self.modules())

    def modules(self) -> tuple[LoraModule, ...]:
        """Return the adapters of `lora_modules`, each name once.

        Raises:
            ConfigError: one has another form, or a name is given twice.
        """
        found = [module for given in self.lora_modules for module in _modules(given)]
        names = [module.name for module in found]
        odd = next((name for name in names if names.count(name) > 1), None)
        if odd is not None:
            raise ConfigError(f"lora_modules has two adapters of the name {odd!r}; give each a name of its own.")
        return tuple(found)


def _modules(given: Any) -> list[LoraModule]:
    if isinstance(given, str):
        if not given.lstrip().startswith(("{", "[")):
            name, _, path = given.partition("=")
            return [_module({"name": name, "path": path}, given)]
        try:
            given = json.loads(given)
        except ValueError as error:
            raise ConfigError(f"lora_modules: {given!r} is not valid JSON: {error}.") from None
    return [_module(one, one) for one in (given if isinstance(given, list | tuple) else [given])]


def _module(fields: Any, given: Any) -> LoraModule:
    good = isinstance(fields, dict) and set(fields) <= _KEYS
    if not good or not all(isinstance(fields.get(key), str) and fields[key] for key in ("name", "path")):
        raise ConfigError(
            f'lora_modules: {given!r} is not NAME=PATH or {{"name": NAME, "path": PATH}}, with "base_model_name" if '
            "you like."
        )
    parent = fields.get("base_model_name")
    if parent is not None and not isinstance(parent, str):
        raise ConfigError(f"lora_modules: base_model_name={parent!r} must be a text.")
    return LoraModule(fields["name"], Path(fields["path"]).expanduser(), parent)


SETTINGS = LoraSettings
