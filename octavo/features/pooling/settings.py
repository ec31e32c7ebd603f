"""Settings of vectors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from octavo.core.flag import setting
from octavo.features import FeatureSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingSettings(FeatureSettings):
    """Settings of vectors.

    Attributes:
        pooler_config: overrides of the checkpoint's pooling: `pooling_type` (MEAN, CLS, LAST), `normalize`,
            `is_matryoshka`, `matryoshka_dimensions`, a `prompt` in front of texts, and the `task` of /pooling.
    """

    pooler_config: dict[str, Any] = setting(
        {},
        'how embeddings are pooled, overriding the model, as JSON: {"pooling_type": "MEAN", "normalize": true}',
        aliases=("override-pooler-config",),
    )


SETTINGS = PoolingSettings
