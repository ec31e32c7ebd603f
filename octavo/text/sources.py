"""The model and tokenizer files that the settings name."""

from __future__ import annotations

from octavo.config import ModelConfig
from octavo.hub.files import ModelFiles
from octavo.hub.overrides import with_overrides
from octavo.hub.progress import Progress, silent
from octavo.hub.resolve import resolve


def model_files(config: ModelConfig, *, weights: bool = True, progress: Progress = silent) -> ModelFiles:
    """Return the model's files, downloaded if necessary, with the user's overrides of its configuration.

    Raises:
        ModelNotFoundError, ModelFileError: as `resolve`.
        ConfigError: an override is invalid.
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
    """Return the files of the tokenizer: the model's own `files`, or those of another model or revision.

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
