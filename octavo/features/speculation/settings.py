"""Settings of speculative decoding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from octavo.core import quantities
from octavo.core.flag import setting
from octavo.features import FeatureSettings
from octavo.features.speculation.config import METHODS, DraftConfig, draft_config


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationSettings(FeatureSettings):
    """Settings of speculative decoding. Without any of them nothing is drafted.

    Raises:
        ConfigError: an unknown key, or a value that it can't have.
    """

    speculative_config: dict[str, Any] = setting(
        {},
        'draft tokens and verify several in one step: {"method": "auto"} turns it on where it gains; all keys are in '
        "docs/speculative.md",
        aliases=("-sc",),
    )
    spec_method: str | None = setting(
        None, "who drafts: the key method of --speculative-config", choices=METHODS, metavar="METHOD"
    )
    spec_model: str | None = setting(None, "the drafting model: the key model of --speculative-config", metavar="MODEL")
    spec_tokens: int | None = setting(
        None,
        "most drafts after one token: the key num_speculative_tokens of --speculative-config",
        read=quantities.count,
        metavar="N",
    )

    def __post_init__(self) -> None:
        self.config()

    def config(self) -> DraftConfig | None:
        """Return who drafts and how much; None if nothing is drafted."""
        return draft_config(self.speculative_config, self.spec_method, self.spec_tokens, self.spec_model)


SETTINGS = SpeculationSettings
