"""Settings of custom logits processors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from octavo.core.errors import ConfigError
from octavo.core.flag import setting
from octavo.features import FeatureSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitsProcessorsSettings(FeatureSettings):
    """Settings of custom logits processors.

    Attributes:
        logits_processors: each "module:Class"; if the engine runs in the caller's process, also classes, instances and
            functions.
    """

    logits_processors: tuple[Any, ...] = setting(
        (),
        "your own code that changes logits before sampling, each as module:Class",
        shown="those of installed packages",
        metavar="MODULE:CLASS",
    )

    def check_sendable(self, why: str) -> None:
        odd = next((one for one in self.logits_processors if not isinstance(one, str)), None)
        if odd is not None:
            raise ConfigError(f"logits_processors={odd!r}: {why}, so name it as 'module:Class'.")


SETTINGS = LogitsProcessorsSettings
