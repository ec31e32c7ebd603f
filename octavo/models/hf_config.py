"""Reading Hugging Face configurations: fields, defaults, and refusal of unsupported features."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from octavo.core.errors import ConfigError, ModelFileError

Config = Mapping[str, Any]
_MOST_LAYERS = 10_000
"""A damaged config with more would keep the start busy for ever."""


def require(config: Config, name: str) -> Any:
    """Return a field without a default.

    Raises:
        ModelFileError: the field is missing or null.
    """
    value = config.get(name)
    if value is None:
        raise ModelFileError(f"The model's config has no '{name}', which this architecture needs.")
    return value


def whole(config: Config, name: str, default: int | None = None) -> int:
    """Return a positive integer field, which is required if it has no default.

    Raises:
        ModelFileError: the field is missing and has no default, is not a positive whole number, or is a number of
            layers that would take hours to build.
    """
    value = require(config, name) if default is None else value_or(config, name, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ModelFileError(f"The model's config has {name}={value!r}, which should be a positive whole number.")
    if name.endswith("layers") and value > _MOST_LAYERS:
        raise ModelFileError(
            f"The model's config has {name}={value}; models of up to {_MOST_LAYERS} layers are served."
        )
    return value


def value_or(config: Config, name: str, default: Any) -> Any:
    """Return a field, or its default if it is missing or null.

    Raises:
        ModelFileError: the default is a number or a truth value, and the field is a text.
    """
    value = config.get(name)
    if value is None:
        return default
    if isinstance(value, str) and isinstance(default, int | float):
        kind = "true or false" if isinstance(default, bool) else "a number"
        raise ModelFileError(f"The model's config has {name}={value!r}, which should be {kind}.")
    return value


class OtherValueError(ConfigError):
    """A field of a model's config has another value than the only one that Octavo's own layers support."""


def only(config: Config, name: str, supported: Any) -> None:
    """Refuse a feature by name.

    Raises:
        OtherValueError: the field has another value than the only supported one.
    """
    value = value_or(config, name, supported)
    if value != supported:
        raise OtherValueError(f"The model's config asks for {name}={value!r}; Octavo supports {supported!r} only.")


class WithDefaults(Mapping[str, Any]):
    """A configuration with defaults for some fields that it may lack. Unlike a copy, it reads only what is asked for,
    so that it remains known which fields an architecture reads."""

    def __init__(self, config: Config, **defaults: Any) -> None:
        self._config, self._defaults = config, defaults

    def __getitem__(self, name: str) -> Any:
        return self._config[name] if name in self._config else self._defaults[name]

    def __iter__(self) -> Iterator[str]:
        return iter({**dict.fromkeys(self._config), **self._defaults})

    def __len__(self) -> int:
        return len(set(self._config) | set(self._defaults))


def is_bidirectional(config: Config) -> bool:
    """Return whether a decoder's tokens attend to later ones, too, as in some embedding models."""
    stated = config.get("use_bidirectional_attention")  # "vision": only the tokens of an image, in Gemma 4
    return not value_or(config, "is_causal", True) or (bool(stated) and stated != "vision")


CLASSIFIER = "ForSequenceClassification"
"""How the names of architectures with a classification head end."""


SCORE_TOKENS = "classifier_from_token"
"""Field of tokens, by number, whose logits a reranker's score is made from."""


def has_language_head(architecture: str) -> bool:
    """Return whether an architecture's name is neither a bare model's nor a classifier's."""
    return architecture.endswith("LMHeadModel") or not architecture.endswith(("Model", CLASSIFIER))


def num_labels(config: Config) -> int:
    """Return the number of outputs of the classification head, if any; Transformers' default is two."""
    if not str((config.get("architectures") or [""])[0]).endswith(CLASSIFIER):
        return 0
    if config.get(SCORE_TOKENS) is not None:
        return 1
    named = config.get("id2label")
    return len(named) if named else whole(config, "num_labels", 2)
