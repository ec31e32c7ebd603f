"""Settings of embeddings in prompts."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.core.flag import setting
from octavo.features import FeatureSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptEmbedsSettings(FeatureSettings):
    """Settings of embeddings in prompts."""

    enable_prompt_embeds: bool = setting(False, "take embeddings in prompts, in place of tokens (prompt_embeds)")


SETTINGS = PromptEmbedsSettings
