"""The models of tokenizers in GGUF files, with their normalizers and decoders: one function for each kind."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE, Unigram, WordPiece

from octavo.core.errors import ModelFileError
from octavo.hub.gguf_file import GGUFFile
from octavo.text.tokenizers.pretokenizers import PRE_TOKENIZERS, PreTokenizer

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
"""Types of tokens."""
REMEDY = "Give another tokenizer with --tokenizer MODEL: a folder, a .gguf file or a name."
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
_WORD_BYTES = 100
"""BERT's limit: a longer word is unknown."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Ends:
    """Which marks a prompt gets, unless the file says otherwise."""

    bos: bool = False
    eos: bool = False
    sep: bool = False


def array(file: GGUFFile, key: str) -> list[Any]:
    """Return a list of the metadata.

    Raises:
        ModelFileError: it is missing or empty.
    """
    values = file.metadata.get(key)
    if not isinstance(values, list) or not values:
        raise ModelFileError(f"{file.path} lacks the metadata {key}, which its tokenizer needs. {REMEDY}")
    return values


def token_id(file: GGUFFile, short: str) -> int | None:
    """Return the number of the token that the file names as "bos", "eos", "unknown" and so on."""
    token = file.metadata.get(f"tokenizer.ggml.{short}_token_id")
    tokens = file.metadata.get("tokenizer.ggml.tokens", [])
    return token if isinstance(token, int) and token < len(tokens) else None


def byte_level(file: GGUFFile, tokens: Sequence[str]) -> tuple[Tokenizer, Ends]:
    """GPT-2's BPE over bytes."""
    rules = _rules(file)
    merges = [tuple(merge.split(" ", 1)) for merge in array(file, "tokenizer.ggml.merges")]
    backend = Tokenizer(BPE(vocab=_vocabulary(tokens), merges=merges, ignore_merges=rules.ignore_merges))
    if rules.normalizer is not None:
        backend.normalizer = rules.normalizer()
    backend.pre_tokenizer = rules.build()
    backend.decoder = decoders.ByteLevel()
    return backend, Ends(bos=rules.add_bos, sep=rules.add_sep)


def _rules(file: GGUFFile) -> PreTokenizer:
    name = file.metadata.get("tokenizer.ggml.pre")
    if name is None:
        _log.warning(
            "%s does not say how it splits text into words (tokenizer.ggml.pre); GPT-2's rules are used. "
            "If answers look odd, convert the model again, or take another tokenizer with --tokenizer MODEL.",
            file.path,
        )
        name = "default"
    if name not in PRE_TOKENIZERS:
        raise ModelFileError(
            f"{file.path} splits text into words by the rules {name!r} (tokenizer.ggml.pre); known are: "
            f"{', '.join(PRE_TOKENIZERS)}. {REMEDY}"
        )
    return PRE_TOKENIZERS[name]


def sentencepiece(file: GGUFFile, tokens: Sequence[str]) -> tuple[Tokenizer, Ends]:
    """SentencePiece's BPE: the pair whose union has the highest score is merged first; unknown text becomes bytes."""
    scores = array(file, "tokenizer.ggml.scores")
    kinds = array(file, "tokenizer.ggml.token_type")
    vocabulary = _vocabulary(tokens)
    merges = merges_from_scores(
        {
            token: score
            for token, score, kind in zip(tokens, scores, kinds, strict=True)
            if kind in (NORMAL, USER_DEFINED)
        },
        vocabulary,
    )
    unknown = tokens[token_id(file, "unknown") or 0]
    backend = Tokenizer(BPE(vocab=vocabulary, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    replace = normalizers.Replace(" ", _SPACE)
    undo = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if file.metadata.get("tokenizer.ggml.add_space_prefix", True):
        backend.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), replace])
        backend.decoder = decoders.Sequence([*undo, decoders.Strip(" ", 1, 0)])
    else:
        backend.normalizer = replace
        backend.decoder = decoders.Sequence(undo)
    return backend, Ends(bos=True)


def merges_from_scores(scores: dict[str, float], vocabulary: dict[str, int]) -> list[tuple[str, str]]:
    """Return pairs in merge order: by the score of their union, then by lower ids."""
    found = []
    for token, score in scores.items():
        for cut in range(1, len(token)):
            left, right = vocabulary.get(token[:cut]), vocabulary.get(token[cut:])
            if left is not None and right is not None:
                found.append((-score, left, right, token[:cut], token[cut:]))
    found.sort(key=lambda pair: pair[:3])
    return [(left, right) for *_, left, right in found]


def word_piece(file: GGUFFile, tokens: Sequence[str]) -> tuple[Tokenizer, Ends]:
    """BERT's: the longest pieces of each word from the left. Files mark pieces at the beginning of words, instead of
    those inside them."""
    kinds = file.metadata.get("tokenizer.ggml.token_type") or [NORMAL] * len(tokens)
    words = [
        token if kind in (CONTROL, UNKNOWN) else token[1:] if token.startswith(_SPACE) else f"##{token}"
        for token, kind in zip(tokens, kinds, strict=True)
    ]
    unknown = token_id(file, "unknown")
    vocabulary = _vocabulary(words)
    model = WordPiece(
        vocab=vocabulary,
        unk_token="[UNK]" if unknown is None else words[unknown],
        max_input_chars_per_word=_WORD_BYTES,
    )
    backend = Tokenizer(model)
    lowercase = file.metadata.get("tokenizer.ggml.normalizer.lowercase", True)
    accents = file.metadata.get("tokenizer.ggml.normalizer.strip_accents", lowercase)
    backend.normalizer = normalizers.BertNormalizer(lowercase=lowercase, strip_accents=accents)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    return backend, Ends(bos=True, sep=True)


def unigram(file: GGUFFile, tokens: Sequence[str]) -> tuple[Tokenizer, Ends]:
    """SentencePiece's unigram model: the most likely pieces of the text (T5, XLM-RoBERTa)."""
    scores = array(file, "tokenizer.ggml.scores")
    kinds = file.metadata.get("tokenizer.ggml.token_type") or [NORMAL] * len(tokens)
    has_bytes = BYTE in kinds
    unknown = token_id(file, "unknown")
    if unknown is None:
        unknown = kinds.index(UNKNOWN) if UNKNOWN in kinds else 2
    backend = Tokenizer(Unigram(list(zip(tokens, scores, strict=True)), unk_id=unknown, byte_fallback=has_bytes))
    steps: list[normalizers.Normalizer] = []
    charsmap = file.metadata.get("tokenizer.ggml.precompiled_charsmap")
    if charsmap:
        steps.append(normalizers.Precompiled(bytes(byte & 0xFF for byte in charsmap)))
    if file.metadata.get("tokenizer.ggml.remove_extra_whitespaces", False):
        steps += [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
    backend.normalizer = normalizers.Sequence(steps)
    prefix = "always" if file.metadata.get("tokenizer.ggml.add_space_prefix", True) else "never"
    backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement=_SPACE, prepend_scheme=prefix)
    spaces = decoders.Metaspace(replacement=_SPACE, prepend_scheme=prefix)
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), spaces]) if has_bytes else spaces
    return backend, Ends(eos=True)


def _vocabulary(tokens: Sequence[str]) -> dict[str, int]:
    return {token: number for number, token in enumerate(tokens)}


KINDS: dict[str, Callable[[GGUFFile, Sequence[str]], tuple[Tokenizer, Ends]]] = {
    "gpt2": byte_level,
    "llama": sentencepiece,
    "bert": word_piece,
    "t5": unigram,
}
"""`tokenizer.ggml.model` -> its function."""
