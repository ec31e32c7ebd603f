"""Settings of speculative decoding, and what follows from them for a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from octavo.core import quantities
from octavo.core.errors import ConfigError
from octavo.core.flag import setting
from octavo.features import FeatureContext, FeatureSettings
from octavo.features.speculation.config import MEASURED_MODELS, METHODS, OFF, DraftConfig, draft_config


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationSettings(FeatureSettings):
    """Settings of speculative decoding. Without any of them, only some models draft on a CPU (`drafting`).

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
        None,
        "drafting method: the key method of --speculative-config",
        shown="auto for smollm2 on a CPU, else none",
        choices=(*METHODS, OFF),
        metavar="METHOD",
    )
    spec_model: str | None = setting(None, "the drafting model: the key model of --speculative-config", metavar="MODEL")
    spec_tokens: int | None = setting(
        None,
        "most drafts after one token: the key num_speculative_tokens of --speculative-config",
        shown="3 or 7, by method and device",
        read=quantities.count,
        metavar="N",
    )

    def __post_init__(self) -> None:
        self.config()

    def config(self) -> DraftConfig | None:
        """Return the drafting method and its numbers as set; None if no setting asks for drafts."""
        return draft_config(self.speculative_config, self.spec_method, self.spec_tokens, self.spec_model)

    @property
    def given(self) -> bool:
        """Whether any setting was given, `none` included."""
        return bool(self.speculative_config) or any((self.spec_method, self.spec_tokens, self.spec_model))


def drafting(context: FeatureContext) -> DraftConfig | None:
    """Return the drafting method for this engine's model, and its numbers; None if nothing is drafted.

    Without settings, `auto` drafts on a CPU for the models that were measured to gain.

    Raises:
        ConfigError: the settings ask for drafts, and the engine generates no text.
    """
    settings = context.settings_of(SpeculationSettings)
    config = settings.config()
    if not context.generates:
        if config is not None:
            raise ConfigError(
                f"--spec-method {config.method} drafts tokens, and {context.model_name} is served for vectors, not for "
                "text. Leave it out, with --spec-model, --spec-tokens and --speculative-config."
            )
        return None
    if config is None and not settings.given and context.model_name in MEASURED_MODELS and context.device == "cpu":
        config = DraftConfig()
    return config.on(context.device) if config else None


SETTINGS = SpeculationSettings
