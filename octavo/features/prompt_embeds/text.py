"""`PromptEmbedsText`: the text half. It reads embeddings, checks them, and lays them out among the prompt's tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from octavo.core.params import SamplingParams
from octavo.text.hooks import ReadPrompt, TextHook


class PromptEmbedsText(TextHook):
    """Claims prompts with embeddings, alone or among the parts of messages."""

    name = "prompt_embeds"
    prompt_fields = ("prompt_embeds",)
    part_fields: ClassVar[Mapping[str, str]] = {"prompt_embeds": "data"}

    def read_prompt(self, prompt: Mapping[str, Any], params: SamplingParams, *, truncated: bool) -> ReadPrompt:
        from octavo.features.prompt_embeds.read import lay_out  # imported here: it needs numpy

        return lay_out(prompt, self.context.tokenizer, self.context.info, params, truncated=truncated)


TEXT = PromptEmbedsText
