"""Numbers of a model's tokens, from the tokenizer's file."""

from __future__ import annotations

from typing import Any

from octavo.core.errors import ConfigError
from octavo.hub.files import ModelFiles
from octavo.hub.json_file import read_json

_FIELD = "--hf-overrides classifier_from_token"


def token_numbers(files: ModelFiles, tokens: Any) -> list[int]:
    """Return the numbers of one or two tokens, given by their texts or numbers.

    Raises:
        ConfigError: it is no list of them, or the vocabulary in tokenizer.json lacks one.
        ModelFileError: tokenizer.json can't be read.
    """
    if not isinstance(tokens, list) or len(tokens) not in (1, 2):
        raise ConfigError(f"{_FIELD}: {tokens!r} must be a list of one or two tokens, such as ['no', 'yes'].")
    return [token if isinstance(token, int) else _number(files, str(token)) for token in tokens]


def _number(files: ModelFiles, token: str) -> int:
    path = files.path / "tokenizer.json"
    if not path.is_file():
        raise ConfigError(f"{_FIELD}: {files.name} has no tokenizer.json to look up {token!r}; give its number.")
    content = read_json(path)
    added = {one["content"]: one["id"] for one in content.get("added_tokens") or []}
    vocabulary = (content.get("model") or {}).get("vocab") or {}
    number = added.get(token, vocabulary.get(token) if isinstance(vocabulary, dict) else None)
    if number is None:
        raise ConfigError(f"{_FIELD}: the vocabulary of {files.name} has no token {token!r}; give its number.")
    return int(number)
