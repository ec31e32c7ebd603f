"""`ModelText`: everything about text that comes with a model, loaded from its files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.config import ModelConfig
from octavo.core.errors import ConfigError
from octavo.hub.files import ModelFiles
from octavo.hub.json_file import read_json
from octavo.hub.resolve import resolve
from octavo.text.chat import ChatTemplate, chat_template_of
from octavo.text.prepare import SAMPLING_DEFAULTS
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


def load_text(files: ModelFiles, config: ModelConfig | None = None, *, chat_template: str | None = None) -> ModelText:
    """Load the tokenizer and compile the chat template.

    Args:
        config: may name another model to take the tokenizer (and so the template) from, and other sampling defaults.
        chat_template: a Jinja template, or a file with one, instead of the model's own.

    Raises:
        ModelNotFoundError, ModelFileError, ConfigError: a file is missing or wrong; the text names it.
    """
    config = config or ModelConfig()
    source = files if config.tokenizer is None else resolve(config.tokenizer, tokenizer_only=True)
    loaded = load_tokenizer(source)
    defaults = _generation_config(config.generation_config, files) | _overrides(config)
    return ModelText(loaded, chat_template_of(loaded, chat_template), defaults)


def _generation_config(where: str, files: ModelFiles) -> dict[str, Any]:
    if where in ("none", "vllm"):
        return {}
    if where == "auto":
        return dict(files.generation_config)
    path = Path(where).expanduser() / "generation_config.json"
    if not path.is_file():
        raise ConfigError(
            f"generation_config={where!r}: there is no {path}; give auto, none, or a folder that has one."
        )
    return read_json(path)


def _overrides(config: ModelConfig) -> dict[str, Any]:
    unknown = next((name for name in config.override_generation_config if name not in SAMPLING_DEFAULTS), None)
    if unknown is not None:
        raise ConfigError(
            f"override_generation_config: {unknown!r} is no sampling default; they are {', '.join(SAMPLING_DEFAULTS)}."
        )
    return config.override_generation_config
