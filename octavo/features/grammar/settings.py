"""Settings of structured output."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from octavo.core.flag import setting
from octavo.features import FeatureSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarSettings(FeatureSettings):
    """Settings of structured output.

    Raises:
        ConfigError: an unknown field, or a value that it cannot have.
    """

    structured_outputs_config: dict[str, Any] = setting(
        {},
        'defaults for the JSON of all structured outputs: {"disable_any_whitespace": true}, '
        '{"disable_additional_properties": true}',
    )

    def __post_init__(self) -> None:
        from octavo.features.grammar.defaults import StructuredDefaults

        StructuredDefaults.of(self.structured_outputs_config)


SETTINGS = GrammarSettings
