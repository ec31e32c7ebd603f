"""The files of a drafting model, and whether its vocabulary is that of the model it drafts for."""

from __future__ import annotations

from collections.abc import Sequence

from octavo.core.cache_groups import CacheGroup
from octavo.core.errors import ConfigError
from octavo.features import FeatureContext
from octavo.features.speculation.config import DraftConfig
from octavo.hub.files import ModelFiles
from octavo.hub.resolve import resolve
from octavo.hub.text_config import text_config
from octavo.text.tokenizers.tokenizer import load_tokenizer


def draft_files(config: DraftConfig, context: FeatureContext) -> ModelFiles:
    """Return the files of `config.model`; without weights if those of the model are random, too.

    Raises:
        ModelNotFoundError, ModelFileError: as `resolve`.
    """
    assert config.model is not None
    random = context.files is not None and not context.files.weights
    return resolve(config.model, revision=config.revision, weights=not random, download_dir=context.download_dir)


def check_layers(config: DraftConfig, groups: Sequence[CacheGroup]) -> None:
    """Raise ConfigError if the target has no cache group with blocks for all positions, which models that draft and
    heads need."""
    if not any(group.grows for group in groups):
        raise ConfigError(
            f"speculative_config: method={config.method} does not work with models that have only recurrent layers. "
            "Set method=ngram or method=suffix."
        )


def check_vocabulary(files: ModelFiles, context: FeatureContext) -> None:
    """Check that the tokens of a drafting model are those of the model that it drafts for.

    Their numbers of logits may differ, since some checkpoints are padded. Without tokenizers they must be equal.

    Raises:
        ConfigError: the vocabularies differ.
    """
    size = text_config(files.config).get("vocab_size")
    if context.files is not None and _has_tokenizer(files) and _has_tokenizer(context.files):
        theirs, ours = (one.backend.get_vocab() for one in (load_tokenizer(files), context.load_tokenizer()))
        if theirs == ours:
            return
        different = [token for token in theirs.keys() | ours.keys() if theirs.get(token) != ours.get(token)]
        raise ConfigError(
            f"speculative_config: model={files.name!r} has another vocabulary than {context.model_name!r}: "
            f"{len(different):,} of its tokens differ, such as {min(different)!r}. Drafts are tokens, so name a model "
            "of the same family and tokenizer."
        )
    if size != context.vocab_size:
        raise ConfigError(
            f"speculative_config: model={files.name!r} has {size} tokens, and {context.model_name!r} "
            f"{context.vocab_size}. Drafts are tokens, so name a model with the same vocabulary."
        )


def _has_tokenizer(files: ModelFiles) -> bool:
    return files.format == "gguf" or (files.path / "tokenizer.json").is_file()
