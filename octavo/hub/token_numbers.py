"""Numbers of a model's tokens, from the tokenizer's files."""

from __future__ import annotations

from typing import Any

from octavo.core.errors import ConfigError
from octavo.hub.files import ModelFiles
from octavo.hub.json_file import read_json, read_json_if_there

_FIELD = "--hf-overrides classifier_from_token"
_TOKENIZER = "tokenizer.json"


def token_numbers(files: ModelFiles, tokens: Any) -> list[int]:
    """Return the numbers of one or two tokens, given by their texts or numbers.

    Raises:
        ConfigError: it is no list of them, or the vocabulary in tokenizer.json lacks one.
        ModelFileError: tokenizer.json can't be read.
    """
    if not isinstance(tokens, list) or len(tokens) not in (1, 2):
        raise ConfigError(f"{_FIELD}: {tokens!r} must be a list of one or two tokens, such as ['no', 'yes'].")
    return [token if isinstance(token, int) else _number(files, str(token)) for token in tokens]


def end_token(files: ModelFiles, *, search: bool) -> int | None:
    """Return the number of the token that the tokenizer's files name as its end mark; None if they name none.

    Args:
        search: read tokenizer.json, which may be large, if tokenizer_config.json does not have the number.

    Raises:
        ModelFileError: one of the files can't be read.
    """
    folder = files.path
    named = read_json_if_there(folder / "special_tokens_map.json") | read_json_if_there(
        folder / "tokenizer_config.json"
    )
    value = named.get("eos_token")
    token = value.get("content") if isinstance(value, dict) else value
    if not isinstance(token, str):
        return None
    for number, added in (named.get("added_tokens_decoder") or {}).items():
        if added.get("content") == token:
            return int(number)
    if not search or not (folder / _TOKENIZER).is_file():
        return None
    return _look_up(read_json(folder / _TOKENIZER), token)


def _number(files: ModelFiles, token: str) -> int:
    path = files.path / _TOKENIZER
    if not path.is_file():
        raise ConfigError(f"{_FIELD}: {files.name} has no tokenizer.json to look up {token!r}; give its number.")
    number = _look_up(read_json(path), token)
    if number is None:
        raise ConfigError(f"{_FIELD}: the vocabulary of {files.name} has no token {token!r}; give its number.")
    return number


def _look_up(content: dict[str, Any], token: str) -> int | None:
    """Return a token's number in the content of tokenizer.json; None if it has no such token."""
    added = {one["content"]: one["id"] for one in content.get("added_tokens") or []}
    vocabulary = (content.get("model") or {}).get("vocab") or {}
    if isinstance(vocabulary, list):  # pairs of a piece and its score, in the order of their numbers
        vocabulary = {piece: number for number, (piece, _) in enumerate(vocabulary)}
    number = added.get(token, vocabulary.get(token))
    return None if number is None else int(number)
