"""`ProfileSettings`: the folder, contents and limits of an engine's profiles."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.core.errors import ConfigError

FOLDER_VARIABLES = ("OCTAVO_TORCH_PROFILER_DIR", "VLLM_TORCH_PROFILER_DIR")
"""Environment variables that may name the folder, in order of precedence."""

_SWITCHES = {
    "torch_profiler_with_stack": "with_stack",
    "torch_profiler_record_shapes": "record_shapes",
    "torch_profiler_with_memory": "with_memory",
    "torch_profiler_with_flops": "with_flops",
    "torch_profiler_use_gzip": "use_gzip",
}
_COUNTS = {"max_iterations": "max_steps", "max_seconds": "max_seconds"}
_KEYS = ("profiler", "torch_profiler_dir", *_SWITCHES, *_COUNTS, "ignore_frontend")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileSettings:
    """
    Attributes:
        folder: where traces are written.
        with_stack, record_shapes, with_memory, with_flops: what torch's profiler records of each operation in addition.
        use_gzip: compress the traces.
        max_steps, max_seconds: limits after which a profile that is not stopped ends.
    """

    folder: Path
    with_stack: bool = False
    record_shapes: bool = False
    with_memory: bool = False
    with_flops: bool = False
    use_gzip: bool = True
    max_steps: int = 200
    max_seconds: int = 60


def profile_settings(given: Mapping[str, Any]) -> ProfileSettings | None:
    """Parse the keys of `--profiler-config`; return None if none is given. `ignore_frontend` has no effect.

    Raises:
        ConfigError: an unknown key, or an invalid value.
    """
    if not given:
        return None
    for key, value in given.items():
        if key not in _KEYS:
            raise ConfigError(f"--profiler-config has no key {key!r}; it has {', '.join(_KEYS)}.")
        if key in (*_SWITCHES, "ignore_frontend") and type(value) is not bool:
            raise ConfigError(f"--profiler-config: {key} must be true or false, not {value!r}.")
        if key in _COUNTS and (type(value) is not int or value < 1):
            raise ConfigError(f"--profiler-config: {key} must be a whole number of at least 1, not {value!r}.")
    if given.get("profiler", "torch") != "torch":
        raise ConfigError(f'--profiler-config: profiler must be "torch", not {given["profiler"]!r}.')
    folder = given.get("torch_profiler_dir")
    if not isinstance(folder, str) or not folder:
        raise ConfigError("--profiler-config needs torch_profiler_dir, the folder to write profiles to.")
    fields = {field: given[key] for key, field in (_SWITCHES | _COUNTS).items() if key in given}
    return ProfileSettings(folder=Path(folder).expanduser().absolute(), **fields)


def from_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    """Return the settings of the environment variables that name a folder; empty if none is set."""
    folder = next((environ[name] for name in FOLDER_VARIABLES if environ.get(name)), "")
    return {"torch_profiler_dir": folder} if folder else {}
