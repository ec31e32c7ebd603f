"""Settings of structured output."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from octavo.features import FeatureSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings(FeatureSettings):
    """
    Attributes:
        structured_outputs_config: defaults for the JSON of every structured output: `disable_any_whitespace`,
            `disable_additional_properties`.

    Raises:
        ConfigError: an unknown field, or a value that it cannot have.
    """

    structured_outputs_config: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        from octavo.features.grammar.defaults import StructuredDefaults

        StructuredDefaults.of(self.structured_outputs_config)
