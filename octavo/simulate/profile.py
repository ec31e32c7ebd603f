"""`Profile`: an engine's sizes and step times, measured once, in a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from octavo.core.errors import ConfigError
from octavo.core.worker_info import LoadedFacts, WorkerFacts
from octavo.simulate.model import FitErrors, StepModel

FORM = 1


class Profile(msgspec.Struct, frozen=True, kw_only=True):
    """
    Attributes:
        form: version of the file's format; a reader supports one.
        version: Octavo's version that measured.
        model: the model's name.
        settings: "section.field" -> value of those settings of the measured engine that simulations can change.
        flags: its other settings, as flags of octavo serve.
        facts, loaded: of its worker.
        depth: steps that it launched ahead.
        largest: rows and tokens of the largest measured steps.
        steps: the fitted model.
        errors: of the model, for steps that it was not fitted to.
    """

    form: int
    version: str
    model: str
    settings: dict[str, Any]
    flags: list[str]
    facts: WorkerFacts
    loaded: LoadedFacts
    depth: int
    largest: tuple[int, int]
    steps: StepModel
    errors: FitErrors


def read_profile(path: Path) -> Profile:
    """Read a profile.

    Raises:
        ConfigError: the file can't be read, or is not a profile of a supported form.
    """
    try:
        content = path.read_bytes()
        form = msgspec.json.decode(content, type=dict[str, Any]).get("form")
        if form != FORM:
            raise ConfigError(
                f"--profile {path} has form {form}; this version of Octavo reads form {FORM}. Measure again with "
                "octavo bench steps."
            )
        return msgspec.json.decode(content, type=Profile)
    except OSError as error:
        raise ConfigError(
            f"--profile {path} can't be read: {error.strerror or error}. Make one with octavo bench steps."
        ) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"--profile {path} is not a profile of step times: {error}. Make one with octavo bench steps."
        ) from error


def write_profile(profile: Profile, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(profile), indent=1) + b"\n")
