"""The tokenizer in a GGUF file, rebuilt from its metadata."""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer
from tokenizers.processors import TemplateProcessing

from octavo.core.errors import ModelFileError
from octavo.hub.gguf_config import ENDS
from octavo.hub.gguf_file import GGUFFile
from octavo.text.tokenizers.gguf_models import (
    CONTROL,
    KINDS,
    NORMAL,
    REMEDY,
    UNKNOWN,
    USER_DEFINED,
    Ends,
    array,
    token_id,
)

_PHI_PLAIN = ("<unk>", "<s>", "<|endoftext|>")
"""Phi-3's special tokens that leave what follows them as it is."""


def build_backend(file: GGUFFile) -> Tokenizer:
    """Return the `tokenizers` object.

    Raises:
        ModelFileError: an unknown kind of tokenizer or pre-tokenizer (the message lists the known ones), or missing or
            inconsistent metadata.
    """
    kind = file.metadata.get("tokenizer.ggml.model")
    tokens = array(file, "tokenizer.ggml.tokens")
    if kind not in KINDS:
        known = ", ".join(repr(name) for name in KINDS)
        raise ModelFileError(f"{file.path} has a tokenizer of the kind {kind!r}; known are {known}. {REMEDY}")
    try:
        backend, ends = KINDS[kind](file, tokens)
        _add_special(file, backend)
        _add_ends(file, backend, kind, ends)
    except ModelFileError:
        raise
    except Exception as exc:  # the library raises bare Exception for inconsistent vocabulary and merges
        raise ModelFileError(f"{file.path}: no tokenizer can be built from its metadata: {exc}. {REMEDY}") from exc
    return backend


def special_token(file: GGUFFile, short: str) -> str | None:
    """Return the text of the token that the file names as "bos", "eos", "unknown" or "padding"."""
    token = token_id(file, short)
    return None if token is None else file.metadata["tokenizer.ggml.tokens"][token]


def chat_templates(file: GGUFFile) -> dict[str, str]:
    """Return name -> template; the main one is "default"."""
    templates = {}
    for name in file.metadata.get("tokenizer.chat_templates", []):
        source = file.metadata.get(f"tokenizer.chat_template.{name}")
        if source:
            templates[name] = source
    main = file.metadata.get("tokenizer.chat_template")
    return templates | ({"default": main} if main else {})


def _takes_spaces(file: GGUFFile) -> bool:
    """Return whether special tokens take the spaces and line ends after them, as those of Phi-3 do; files don't say so.
    llama.cpp goes by the model's name."""
    metadata = file.metadata
    return metadata.get("general.architecture") == "phi3" and metadata.get("tokenizer.ggml.model") == "llama"


def _add_special(file: GGUFFile, backend: Tokenizer) -> None:
    tokens = file.metadata["tokenizer.ggml.tokens"]
    kinds = file.metadata.get("tokenizer.ggml.token_type") or [NORMAL] * len(tokens)
    kinds = [CONTROL if token in ENDS else kind for token, kind in zip(tokens, kinds, strict=True)]
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind in (CONTROL, UNKNOWN)]
    own = [token for token, kind in zip(tokens, kinds, strict=True) if kind == USER_DEFINED]
    stripping = _takes_spaces(file)
    backend.add_special_tokens(
        [
            AddedToken(token, normalized=False, special=True, rstrip=stripping and token not in _PHI_PLAIN)
            for token in control
        ]
    )
    backend.add_tokens([AddedToken(token, normalized=False, special=False) for token in own])


def _add_ends(file: GGUFFile, backend: Tokenizer, kind: str, ends: Ends) -> None:
    """Add marks around a text, and around two texts in models that read pairs."""
    begin = _mark(file, "bos", "cls") if file.metadata.get("tokenizer.ggml.add_bos_token", ends.bos) else []
    end = _mark(file, "eos") if file.metadata.get("tokenizer.ggml.add_eos_token", ends.eos) else []
    if not end and file.metadata.get("tokenizer.ggml.add_sep_token", ends.sep):
        end = _mark(file, "seperator", "eos")  # so spelled in the format
    marks = dict([*begin, *end])
    if not marks:
        return
    first, last = [text for text, _ in begin], [text for text, _ in end]
    between = last if kind == "bert" else last * 2
    backend.post_processor = TemplateProcessing(
        single=[*first, "$A", *last],
        pair=[*first, "$A", *between, "$B:1", *(f"{text}:1" for text in last)],
        special_tokens=list(marks.items()),
    )


def _mark(file: GGUFFile, *shorts: str) -> list[tuple[str, int]]:
    """Return text and number of the first of these tokens that the file names, if it names any."""
    tokens = file.metadata["tokenizer.ggml.tokens"]
    numbers = (token_id(file, short) for short in shorts)
    return [(tokens[number], number) for number in numbers if number is not None][:1]
