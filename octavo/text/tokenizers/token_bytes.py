"""The bytes of single tokens."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import tokenizers

_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"


def _byte_alphabet() -> dict[str, int]:
    """Return GPT-2's mapping of bytes to visible characters: printable Latin-1 to itself, the rest from U+0100 on."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(0x100 + n): byte for n, byte in enumerate(hidden)}


_BYTES: dict[int, str | int] = {
    **dict.fromkeys(range(256), "\N{REPLACEMENT CHARACTER}"),
    **{ord(char): byte for char, byte in _byte_alphabet().items()},
}
"""For `str.translate`: alphabet character -> byte. Other Latin-1 characters map to a character outside Latin-1."""


@dataclass(frozen=True, slots=True)
class Decoding:
    """How a tokenizer's tokens are decoded to text.

    Attributes:
        kind: "bytes" (GPT-2's alphabet) and "pieces" (SentencePiece with byte tokens) concatenate each token's bytes;
            "other" is decoded by the library.
        strip: number of spaces to drop at the beginning of a text.
    """

    kind: str
    strip: int = 0

    @property
    def concatenates(self) -> bool:
        return self.kind != "other"


def decoding_of(backend: tokenizers.Tokenizer) -> Decoding:
    """Derive the decoding from the tokenizer's decoder."""
    decoder = backend.decoder
    if decoder is None:
        return Decoding("other")
    parts = _flatten(json.loads(decoder.__getstate__()))
    if [part["type"] for part in parts] == ["ByteLevel"]:
        return Decoding("bytes")
    if not parts or not _replaces_space(parts[0]):
        return Decoding("other")
    rest = [part["type"] for part in parts[1:]]
    if rest == ["ByteFallback", "Fuse"]:
        return Decoding("pieces")
    if rest == ["ByteFallback", "Fuse", "Strip"] and parts[-1]["content"] == " " and not parts[-1]["stop"]:
        return Decoding("pieces", strip=parts[-1]["start"])
    return Decoding("other")


def token_bytes(token: str, kind: str) -> bytes:
    """Return the bytes of one token of the vocabulary."""
    if kind == "bytes":
        try:
            return token.translate(_BYTES).encode("latin-1")
        except UnicodeEncodeError:  # a token added verbatim, outside the alphabet, is text
            return token.encode()
    if kind == "pieces":
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            try:
                return bytes([int(token[3:5], 16)])
            except ValueError:
                pass
        return token.replace(_SPACE, " ").encode()
    return token.encode()


def _flatten(state: dict[str, Any]) -> list[dict[str, Any]]:
    return [part for inner in state["decoders"] for part in _flatten(inner)] if state["type"] == "Sequence" else [state]


def _replaces_space(part: dict[str, Any]) -> bool:
    return (part["type"], part.get("pattern"), part.get("content")) == ("Replace", {"String": _SPACE}, " ")
