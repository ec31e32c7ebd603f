"""`ModelText`: a model's tokenizer, chat template and sampling defaults, loaded from its files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.config import ModelConfig
from octavo.core.errors import ConfigError
from octavo.hub.files import ModelFiles
from octavo.hub.json_file import read_json
from octavo.text.chat.content_format import ContentFormat
from octavo.text.chat.template import ChatTemplate, chat_template_of
from octavo.text.prompts.defaults import SAMPLING_DEFAULTS, sampling_defaults
from octavo.text.sources import tokenizer_files
from octavo.text.tokenizers.no_tokenizer import NoTokenizer
from octavo.text.tokenizers.tokenizer import Tokenizer, load_tokenizer


@dataclass(frozen=True, slots=True)
class ModelText:
    """The text-related parts of a model.

    Attributes:
        chat: None for a model without a chat template.
        defaults: the sampling parameters recommended by the model's authors.
        max_tokens: a server's limit on the length of answers.
    """

    tokenizer: Tokenizer
    chat: ChatTemplate | None
    defaults: Mapping[str, Any]
    max_tokens: int | None = None


def load_text(
    files: ModelFiles,
    config: ModelConfig | None = None,
    *,
    chat_template: str | None = None,
    content_format: ContentFormat = "auto",
) -> ModelText:
    """Load the tokenizer and compile the chat template.

    Args:
        config: may name another source of the tokenizer (and so of the template), and override sampling defaults.
        chat_template: a Jinja template, or a file with one, instead of the model's own.
        content_format: the form of message contents for the template.

    Raises:
        ModelNotFoundError, ModelFileError, ConfigError: a file is missing or invalid (the text names it), or a template
            is given without a tokenizer.
    """
    config = config or ModelConfig()
    defaults = _generation_config(config.generation_config, files) | _overrides(config)
    most = _max_tokens(config, defaults)
    if config.skip_tokenizer_init:
        if chat_template is not None:
            raise ConfigError("--chat-template needs a tokenizer; leave out --chat-template or --skip-tokenizer-init.")
        return ModelText(NoTokenizer(int(files.config.get("vocab_size") or 0)), None, defaults, most)
    loaded = load_tokenizer(tokenizer_files(config, files))
    loaded.special_in_content = config.allow_special_in_content
    return ModelText(loaded, chat_template_of(loaded, chat_template, content_format), defaults, most)


def _generation_config(where: str, files: ModelFiles) -> dict[str, Any]:
    if where in ("none", "vllm"):
        return {}
    if where == "auto":
        return dict(files.generation_config)
    path = Path(where).expanduser() / "generation_config.json"
    if not path.is_file():
        raise ConfigError(
            f"--generation-config {where}: there is no {path}; give auto, none, or a folder that has one."
        )
    return read_json(path)


def _max_tokens(config: ModelConfig, defaults: Mapping[str, Any]) -> int | None:
    """Return the limit that the operator sets on every request's length. The model's own value is only a default."""
    told = defaults if config.generation_config not in ("auto", "none", "vllm") else config.override_generation_config
    given: int | None = sampling_defaults(told).get("max_tokens")
    return given


def _overrides(config: ModelConfig) -> dict[str, Any]:
    unknown = next((name for name in config.override_generation_config if name not in SAMPLING_DEFAULTS), None)
    if unknown is not None:
        raise ConfigError(
            f"--override-generation-config: {unknown!r} is not a sampling default; those are "
            f"{', '.join(SAMPLING_DEFAULTS)}."
        )
    return config.override_generation_config
