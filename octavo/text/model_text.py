"""`ModelText`: everything about text that comes with a model, loaded from its files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from octavo.hub.files import ModelFiles
from octavo.hub.resolve import resolve
from octavo.text.chat import ChatTemplate, chat_template_of
from octavo.text.tokenizer import Tokenizer, load_tokenizer


@dataclass(frozen=True, slots=True)
class ModelText:
    """Attributes:
    chat: None for a model without a chat template.
    defaults: the sampling parameters that the model's authors recommend.
    """

    tokenizer: Tokenizer
    chat: ChatTemplate | None
    defaults: Mapping[str, Any]


def load_text(files: ModelFiles, *, tokenizer: str | None = None, chat_template: str | None = None) -> ModelText:
    """Load the tokenizer and compile the chat template.

    Args:
        tokenizer: another model to take the tokenizer (and so the template) from.
        chat_template: a Jinja template, or a file with one, instead of the model's own.

    Raises:
        ModelNotFoundError, ModelFileError, ConfigError: a file is missing or wrong; the text names it.
    """
    source = files if tokenizer is None else resolve(tokenizer, tokenizer_only=True)
    loaded = load_tokenizer(source)
    return ModelText(loaded, chat_template_of(loaded, chat_template), files.generation_config)
