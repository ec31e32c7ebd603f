"""Settings of vectors."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from octavo.features import FeatureSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings(FeatureSettings):
    """
    Attributes:
        pooler_config: overrides of the checkpoint's pooling: `pooling_type` (MEAN, CLS, LAST), `normalize`,
            `is_matryoshka`, `matryoshka_dimensions`, and the `task` of /pooling.
    """

    pooler_config: dict[str, Any] = field(default_factory=dict)
