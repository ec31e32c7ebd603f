"""Checks that overridden fields of a model's configuration exist, and fit the weights."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from octavo.core.errors import ConfigError, ModelFileError
from octavo.hub.files import ModelFiles
from octavo.hub.overrides import ROPE_SETTINGS
from octavo.models.encoders.registry import encoder_spec, is_encoder
from octavo.models.implementation import OWN, Implementation
from octavo.models.spec import DecoderSpec

log = logging.getLogger(__name__)

_READ_ELSEWHERE = {
    "architectures",
    "dtype",
    "torch_dtype",
    "eos_token_id",
    "id2label",
    "num_labels",
    "problem_type",
    "is_matryoshka",
    "matryoshka_dimensions",
    "sbert_ce_default_activation_function",
    "sentence_transformers",
    "is_original_qwen3_reranker",  # with other engines it says what two tokens mean here
}
"""Fields that are read outside the model's architecture."""


def check_overrides(files: ModelFiles, overrides: Mapping[str, Any], implementation: Implementation = OWN) -> None:
    """Check that each overridden field exists; log fields of the model that Octavo does not read.

    Args:
        files: the model with the overrides applied.

    Raises:
        ConfigError: a field that neither the model has nor its architecture reads (the text names it), or an invalid
            configuration.
        ModelFileError: an invalid value of a field of the architecture.
    """
    if not overrides:
        return
    watched, encoder = _ReadTracker(files.config), is_encoder(files.config)
    try:
        spec = (encoder_spec if encoder else implementation.spec_of)(watched)
    except (TypeError, ValueError) as exc:
        raise ConfigError(f"--hf-overrides {', '.join(overrides)}: a value is of the wrong kind ({exc}).") from exc
    read = watched.read | _READ_ELSEWHERE
    read = read - set(ROPE_SETTINGS) if encoder and not isinstance(spec, DecoderSpec) else read | set(ROPE_SETTINGS)
    for name in overrides:
        if name in read:
            continue
        if name not in files.own_fields:
            near = difflib.get_close_matches(name, sorted(read | files.own_fields), n=3)
            hint = f"; did you mean {' or '.join(near)}?" if near else "."
            raise ConfigError(f"--hf-overrides {name}: neither the model nor its architecture has such a field{hint}")
        log.warning("--hf-overrides %s has no effect: Octavo does not read this field of the model's config", name)


@contextmanager
def blamed(overrides: Mapping[str, Any]) -> Iterator[None]:
    """Run the loading of weights in the block, and attribute wrong shapes to the overrides.

    Raises:
        ConfigError: the weights don't have the overridden shapes; the text names the overrides.
    """
    try:
        yield
    except ModelFileError as exc:
        if not overrides:
            raise
        raise ConfigError(
            f"--hf-overrides {', '.join(overrides)}: the weights don't fit the overridden config: {exc} Leave out what "
            "changes shapes, or say --load-format dummy for random weights."
        ) from exc


class _ReadTracker(Mapping[str, Any]):
    """A configuration that records which of its fields were read."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = config
        self.read: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        self.read.add(name)
        return self._config[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._config)

    def __len__(self) -> int:
        return len(self._config)
