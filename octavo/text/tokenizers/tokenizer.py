"""`Tokenizer`: text to token ids and back, from a checkpoint's files, based on the `tokenizers` library."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import tokenizers

from octavo.core.errors import InvalidRequestError, ModelFileError
from octavo.hub.files import ModelFiles
from octavo.hub.gguf_file import read_gguf
from octavo.hub.json_file import read_json_if_there
from octavo.hub.sentence_transformers import text_settings
from octavo.text.tokenizers import gguf
from octavo.text.tokenizers.literal import LiteralEncoder, LiteralText, SpecialTokens
from octavo.text.tokenizers.token_bytes import decoding_of, token_bytes

_LONG = 8192
"""Characters from which a text is encoded with the library's batch method, which releases the GIL."""
_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")


class Tokenizer:
    """Text to token ids and back.

    Attributes:
        vocab_size: the highest id plus one; a model's head may have more rows.
        special_ids: tokens that are marks, not text; `decode` leaves them out by default.
        named_tokens: "bos_token", "eos_token" and the like -> the token's text, for chat templates.
        chat_templates: name -> Jinja source; the main one is "default".
        present: False for the placeholder of a model without a tokenizer.
        special_in_content: whether chat templates allow special tokens in message contents.
    """

    present = True
    special_in_content = False

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        named_tokens: Mapping[str, str] | None = None,
        chat_templates: Mapping[str, str] | None = None,
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        self.backend = backend
        self.named_tokens = dict(named_tokens or {})
        self.chat_templates = dict(chat_templates or {})
        self._mark_named_tokens()
        self.decoding = decoding_of(backend)
        self.special_ids = frozenset(i for i, token in backend.get_added_tokens_decoder().items() if token.special)
        self.vocab_size: int = max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self._bytes: dict[int, bytes] = {}
        self._longest: int | None = None

    @property
    def max_token_chars(self) -> int:
        """Characters of the longest token in the vocabulary's spelling, an upper bound for any token's text."""
        if self._longest is None:
            self._longest = max(map(len, self.backend.get_vocab(with_added_tokens=True)), default=1)
        return self._longest

    @cached_property
    def special(self) -> SpecialTokens:
        """The finder of special tokens in texts."""
        return SpecialTokens(self.backend)

    @cached_property
    def _literal(self) -> LiteralEncoder:
        return LiteralEncoder(self.backend, self.special)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return token ids. Special tokens spelled in the text are parsed, except literal ones of a `LiteralText`.

        Args:
            add_special_tokens: add the model's beginning or end mark, if it uses any. A prompt made by a chat template
                has them already.

        Raises:
            InvalidRequestError: the text contains half of a surrogate pair, which UTF-8 can't represent.
        """
        try:
            ids: list[int] = self._encoding(text, add_special_tokens).ids
        except (TypeError, UnicodeEncodeError) as exc:
            raise _not_text(text) from exc
        return ids

    def encode_with_offsets(
        self, text: str, *, add_special_tokens: bool = True
    ) -> tuple[list[int], list[tuple[int, int]]]:
        """Like `encode`, and return each token's (begin, end) in characters of the text."""
        try:
            if isinstance(text, LiteralText):
                literal = self._literal
                renamed = literal.renamed(text)
                found = literal.backend.encode(renamed.text, add_special_tokens=add_special_tokens)
                return found.ids, [(renamed.original(begin), renamed.original(end)) for begin, end in found.offsets]
            part = self._encoding(text, add_special_tokens)
        except (TypeError, UnicodeEncodeError) as exc:
            raise _not_text(text) from exc
        return part.ids, part.offsets

    def encode_after(self, text: str) -> list[int]:
        """Return token ids of a text that follows something else: as after a special token, without a leading space.

        Raises:
            InvalidRequestError: as `encode`.
        """
        for token, added in self.backend.get_added_tokens_decoder().items():
            if added.special and not added.rstrip:
                ids = self.encode(added.content + text, add_special_tokens=False)
                if ids[:1] == [token]:
                    return ids[1:]
        return self.encode(text, add_special_tokens=False)

    def encode_within(
        self,
        text: str,
        pair: str | None = None,
        *,
        limit: int | None = None,
        side: Literal["left", "right"] = "right",
        add_special_tokens: bool = True,
    ) -> tuple[list[int], list[int]]:
        """Return token ids of one text, or of two as one sequence, and each token's type: 0 or 1 for its text.

        Args:
            limit: maximum number of ids, including the tokenizer's marks. Of two texts, the longer one is truncated
                first.
            side: where texts are truncated.

        Raises:
            InvalidRequestError: as `encode`; or the marks alone exceed the limit.
        """
        texts = [text] if pair is None else [text, pair]
        try:
            parts = [self._encoding(one, False) for one in texts]
        except (TypeError, UnicodeEncodeError) as exc:
            raise _not_text(next((one for one in texts if not _is_whole(one)), text)) from exc
        if limit is not None:
            marks = self.backend.num_special_tokens_to_add(pair is not None) if add_special_tokens else 0
            if limit <= marks:
                raise InvalidRequestError(
                    f"truncate_prompt_tokens must be more than the {marks} special tokens that the tokenizer adds, "
                    f"got {limit}.",
                    param="truncate_prompt_tokens",
                    value=limit,
                )
            for part, room in zip(parts, _shares([len(part) for part in parts], limit - marks), strict=True):
                part.truncate(room, direction=side)
        whole = self.backend.post_process(parts[0], parts[1] if pair is not None else None, add_special_tokens)
        return whole.ids, whole.type_ids

    def shorten(self, text: str, limit: int) -> str:
        """Return the beginning of a text that its first `limit` tokens cover.

        Raises:
            InvalidRequestError: as `encode`.
        """
        try:
            part = self._encoding(text, False)
        except (TypeError, UnicodeEncodeError) as exc:
            raise _not_text(text) from exc
        return text if len(part) <= limit else text[: part.offsets[limit - 1][1]]

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text. Invalid UTF-8 becomes U+FFFD; ids outside the vocabulary are skipped."""
        if not self.decoding.concatenates:
            known = [token for token in ids if 0 <= token < self.vocab_size]
            text: str = self.backend.decode(known, skip_special_tokens=skip_special_tokens)
            return text
        skip = self.special_ids if skip_special_tokens else frozenset()
        text = b"".join(self.token_bytes(token) for token in ids if token not in skip).decode("utf-8", "replace")
        return text[self.leading_spaces(text) :]

    def leading_spaces(self, text: str) -> int:
        """Return how many of a text's leading spaces the tokenizer has inserted itself."""
        spaces = len(text) - len(text.lstrip(" "))
        return min(spaces, self.decoding.strip)

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes of one token, which may be parts of characters. Empty outside the vocabulary."""
        known = self._bytes.get(token)
        if known is None:
            text = self.backend.id_to_token(token) if 0 <= token < self.vocab_size else None
            known = token_bytes(text, self.decoding.kind) if text is not None else b""
            self._bytes[token] = known
        return known

    def token_text(self, token: int) -> str:
        """Return one token as text, special ones included; U+FFFD for parts of characters."""
        return self.token_bytes(token).decode("utf-8", "replace")

    def _encoding(self, text: str, add_special_tokens: bool) -> tokenizers.Encoding:
        """Encode with the library; a long text without token positions, and with the GIL released."""
        backend = self.backend
        if isinstance(text, LiteralText):
            literal = self._literal  # read once: another thread may replace it together with its names
            backend, text = literal.backend, literal.renamed(text).text
        if len(text) <= _LONG:
            return backend.encode(text, add_special_tokens=add_special_tokens)
        (encoding,) = backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return encoding

    def _mark_named_tokens(self) -> None:
        """Mark the named tokens as special, which some checkpoints omit."""
        present = {token.content for token in self.backend.get_added_tokens_decoder().values() if token.special}
        missing = [
            token
            for token in self.named_tokens.values()
            if token not in present and self.backend.token_to_id(token) is not None
        ]
        if missing:
            self.backend.add_special_tokens(
                [tokenizers.AddedToken(token, normalized=False, special=True) for token in missing]
            )


def load_tokenizer(files: ModelFiles) -> Tokenizer:
    """Return the tokenizer of a checkpoint: its tokenizer.json, or the one in a GGUF file's metadata.

    Raises:
        ModelFileError: missing, corrupt, or of an unknown kind.
    """
    if files.format == "gguf":
        return _from_gguf(files.path)
    return _from_folder(files.path, lowercase=text_settings(files).get("do_lower_case") is True)


def _from_gguf(path: Path) -> Tokenizer:
    file = read_gguf(path)
    shorts = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    named = {name: gguf.special_token(file, short) for name, short in shorts.items()}
    return Tokenizer(
        gguf.build_backend(file),
        named_tokens={name: token for name, token in named.items() if token is not None},
        chat_templates=gguf.chat_templates(file),
    )


def _from_folder(folder: Path, *, lowercase: bool = False) -> Tokenizer:
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ModelFileError(
            f"{folder} has no tokenizer.json. Take another model's with --tokenizer MODEL (a folder, a .gguf file or a "
            "name); or, if the folder has a tokenizer in an older format, convert it with transformers' "
            "AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)."
        )
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as exc:  # the library raises bare Exception for any error
        raise ModelFileError(f"{path} is corrupt or in an unknown format: {exc}. Download the file again.") from exc
    if lowercase:  # as sentence-transformers: in front of the tokenizer's own rules
        own = [] if backend.normalizer is None else [backend.normalizer]
        backend.normalizer = tokenizers.normalizers.Sequence([tokenizers.normalizers.Lowercase(), *own])
    config = read_json_if_there(folder / "tokenizer_config.json")
    return Tokenizer(backend, named_tokens=_named_tokens(folder, config), chat_templates=_templates(folder, config))


def _named_tokens(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    merged = read_json_if_there(folder / "special_tokens_map.json") | config
    named = {}
    for name in _NAMED_TOKENS:
        value = merged.get(name)
        content = value.get("content") if isinstance(value, dict) else value
        if isinstance(content, str):
            named[name] = content
    return named


def _templates(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """Return the templates. Newer checkpoints keep them in separate files, which override those in the config."""
    templates: dict[str, str] = {}
    for content in (config, read_json_if_there(folder / "chat_template.json")):
        value = content.get("chat_template")
        if isinstance(value, str):
            templates["default"] = value
        elif isinstance(value, list):
            templates |= {entry["name"]: entry["template"] for entry in value if {"name", "template"} <= entry.keys()}
    more = sorted((folder / "additional_chat_templates").glob("*.jinja"))
    for name, path in [*((path.stem, path) for path in more), ("default", folder / "chat_template.jinja")]:
        if path.is_file():
            templates[name] = path.read_text(encoding="utf-8")
    return templates


def _shares(lengths: list[int], room: int) -> list[int]:
    """Divide `room` tokens among one or two texts, truncating the longer one first."""
    if len(lengths) == 1:
        return [min(lengths[0], room)]
    first, second = lengths
    if first + second <= room:
        return lengths
    half = room // 2
    if first <= half:
        return [first, room - first]
    if second <= room - half:
        return [room - second, second]
    return [half, room - half]


def _is_whole(text: Any) -> bool:
    return isinstance(text, str) and not any("\ud800" <= char <= "\udfff" for char in text)


def _not_text(text: Any) -> InvalidRequestError:
    if not isinstance(text, str):
        return InvalidRequestError(f"The prompt must be text, got {type(text).__name__}.", param="prompt", value=text)
    place = next((n for n, char in enumerate(text) if "\ud800" <= char <= "\udfff"), 0)
    return InvalidRequestError(
        f"The text can't be encoded: at character {place} it holds U+{ord(text[place]):04X}, half of a surrogate pair. "
        "Send complete characters.",
        param="prompt",
        value=ascii(text[max(place - 10, 0) : place + 10]),
    )
