"""Flags of embeddings in prompts."""

from __future__ import annotations

from octavo.cli.flags.flag import Flag

FLAGS = (
    Flag(
        "enable-prompt-embeds",
        "prompt_embeds.enable_prompt_embeds",
        "take embeddings in prompts, in place of tokens (prompt_embeds)",
        "off",
        switch=True,
    ),
)
