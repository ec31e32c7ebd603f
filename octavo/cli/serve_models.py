"""The models of `octavo serve MODEL MODEL ...` and of `--models FILE`, with the settings of each."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from octavo.cli.flags.args import convert, engine_from, from_mapping, known_flags, read_yaml, server_from
from octavo.cli.flags.parser import OctavoParser
from octavo.core.errors import ConfigError
from octavo.hub.catalogue import CATALOGUE
from octavo.hub.repository import looks_like_repository
from octavo.pool.settings import OF_THE_FRONT, ModelEntry, PoolConfig

CHILD = (sys.executable, "-m", "octavo.cli.pool_child")
"""The command of a model's process."""
_MODEL = "model.model"
_NAMES = "server.served_model_name"
_ONE_FILE = {"device.record_steps": "record-steps"}
"""Settings of a file that two processes can't write."""


def entries(parser: OctavoParser, models: Sequence[str], found: Mapping[str, Any]) -> list[ModelEntry]:
    """Return the models, those of the command line first.

    Args:
        found: target -> value of the settings that hold for all models.

    Raises:
        ConfigError: a model can't be served beside others as asked; the text names it.
    """
    _check_common(models, found)
    path = found.get("pool.models")
    own = {name: {_MODEL: name} for name in models}
    if len(own) < len(models):
        twice = next(name for name in models if models.count(name) > 1)
        raise ConfigError(f"the model {twice} is given twice; leave one out, or name each in a file (--models).")
    if path is not None:
        for name, settings in _from_file(parser, Path(path)).items():
            if name in own:
                raise ConfigError(f"--models {path}: {name} is also on the command line; leave one out.")
            own[name] = settings
    most = found.get("pool.max_loaded_models", PoolConfig().max_loaded_models)
    made = [_entry(name, dict(found) | settings, most) for name, settings in own.items()]
    _check_names(made)
    _check_parts(made, most)
    return made


def _check_common(models: Sequence[str], found: Mapping[str, Any]) -> None:
    server = server_from(found)
    refused = (
        (_MODEL in found, "--model", "names one model; give several as octavo serve MODEL MODEL ..."),
        (_NAMES in found, "--served-model-name", "would name all models alike; set it for each in a file (--models)"),
        (
            server.api_server_count > 1,
            f"--api-server-count {server.api_server_count}",
            "is for one model; of several, each has a process that answers HTTP",
        ),
        (
            server.skip_model_name_validation,
            "--skip-model-name-validation",
            "leaves open which of several models a request wants",
        ),
    )
    for given, flag, why in refused:
        if given:
            raise ConfigError(f"{flag} {why}. Leave it out.")
    for target, name in _ONE_FILE.items():
        if target in found:
            raise ConfigError(f"--{name} can't be one file of several models; set it for each in a file (--models).")


def _from_file(parser: OctavoParser, path: Path) -> dict[str, dict[str, Any]]:
    """Return name -> target -> value."""
    where = f"--models {path}"
    content, written = read_yaml(path, where)
    if not isinstance(content, dict) or not content:
        raise ConfigError(
            f"{where} must hold a name for each model, and below it its settings (docs/several-models.md)."
        )
    names = [key.value for key, _ in written.value]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ConfigError(f"{where}: {twice} is there twice; give each model a name of its own.")
    nodes = {key.value: node for key, node in written.value}
    return {str(name): _section(parser, f"{where}: {name}", part, nodes[str(name)]) for name, part in content.items()}


def _section(parser: OctavoParser, where: str, content: Any, written: Any) -> dict[str, Any]:
    if isinstance(content, str):
        return {_MODEL: content}
    known = known_flags(parser)
    found = from_mapping(content, written, where, known, parser)
    targets = {flag.target: flag for flag in known.values()}
    for target in found:
        section, _, field = target.partition(".")
        if section == "pool" or (section == "server" and field in OF_THE_FRONT):
            raise ConfigError(
                f"{where}: {targets[target].name} holds for the whole server; give it on the command line."
            )
    if _MODEL not in found:
        raise ConfigError(f"{where} names no model; add a line `model: ...`.")
    return {target: convert(targets[target], value) for target, value in found.items()}


def _entry(name: str, settings: Mapping[str, Any], most: int) -> ModelEntry:
    engine, server = engine_from(settings), server_from(settings)
    model = engine.model.model
    if not (model in CATALOGUE or os.path.exists(os.path.expanduser(model)) or looks_like_repository(model)):
        known = ", ".join(CATALOGUE)
        raise ConfigError(
            f"{model} is not a folder or file, nor a Hugging Face id (owner/name), nor one of the short names {known}."
        )
    if engine.parallel.nnodes > 1:
        raise ConfigError(
            f"{name}: --nnodes {engine.parallel.nnodes}: a model on several machines can't be one of several."
        )
    engine.check()
    server.check()
    if engine.cache.models_on_device is None:
        engine = replace(engine, cache=replace(engine.cache, models_on_device=most))
    names = (name, *(other for other in server.served_model_name if other != name))
    added = tuple(one for own in engine.features.values() for one in own.model_names)
    return ModelEntry(names=names, added=added, engine=engine, server=server)


def _check_names(made: Iterable[ModelEntry]) -> None:
    owners: dict[str, str] = {}
    for entry in made:
        for name in (*entry.names, *entry.added):
            if name in owners:
                raise ConfigError(f"{name} names both {owners[name]} and {entry.name}; give each a name of its own.")
            owners[name] = entry.name


def _check_parts(made: Iterable[ModelEntry], most: int) -> None:
    """Refuse parts of the device's memory that can't be there at once."""
    parts = sorted((entry.engine.cache.memory_utilization or 0.0 for entry in made), reverse=True)[:most]
    if most > 1 and sum(parts) > 1:
        raise ConfigError(
            f"--gpu-memory-utilization: {most} models may be loaded at once (--max-loaded-models), and together they "
            f"take up to {sum(parts):g} of the memory. Lower the fractions, or leave them out: each model then has an "
            "equal part."
        )
