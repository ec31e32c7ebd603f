"""Which files the engine and its front end are made of, as the settings name them."""

from __future__ import annotations

from octavo.config import ModelConfig
from octavo.hub.files import ModelFiles
from octavo.hub.overrides import with_overrides
from octavo.hub.progress import Progress, silent
from octavo.hub.resolve import resolve


def model_files(config: ModelConfig, *, weights: bool = True, progress: Progress = silent) -> ModelFiles:
    """The model's, downloaded if need be, and its configuration as the user wants it.

    Raises:
        ModelNotFoundError, ModelFileError: as `resolve`.
        ConfigError: an override that can't be.
    """
    files = resolve(
        config.model,
        revision=config.revision,
        weights=weights,
        progress=progress,
        download_dir=config.download_dir,
    )
    return with_overrides(files, config.config_overrides)


def tokenizer_files(config: ModelConfig, files: ModelFiles) -> ModelFiles:
    """Those with the tokenizer: the model's own `files`, or those of another model or another revision.

    Raises:
        ModelNotFoundError, ModelFileError: as `resolve`.
    """
    if config.tokenizer is None and config.tokenizer_revision in (None, config.revision):
        return files
    return resolve(
        config.tokenizer or config.model,
        revision=config.tokenizer_revision,
        tokenizer_only=True,
        download_dir=config.download_dir,
    )
