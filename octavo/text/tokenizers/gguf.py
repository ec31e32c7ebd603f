"""The tokenizer in a GGUF file, rebuilt from its metadata."""

from __future__ import annotations

import logging
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, normalizers
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing

from octavo.core.errors import ModelFileError
from octavo.hub.gguf_file import GGUFFile
from octavo.text.tokenizers.pretokenizers import PRE_TOKENIZERS, PreTokenizer

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
_log = logging.getLogger(__name__)


def build_backend(file: GGUFFile) -> Tokenizer:
    """Return the `tokenizers` object.

    Raises:
        ModelFileError: an unknown kind of tokenizer or pre-tokenizer (the message lists the known ones), or missing or
            inconsistent metadata.
    """
    kind = file.metadata.get("tokenizer.ggml.model")
    tokens = _array(file, "tokenizer.ggml.tokens")
    try:
        if kind == "gpt2":
            backend, add_bos = _byte_level(file, tokens)
        elif kind == "llama":
            backend, add_bos = _sentencepiece(file, tokens), True
        else:
            raise ModelFileError(
                f"{file.path} has a tokenizer of the kind {kind!r}; known are 'gpt2' and 'llama'. {_REMEDY}"
            )
        _add_special(file, backend, tokens)
        _add_ends(file, backend, tokens, add_bos)
    except ModelFileError:
        raise
    except Exception as exc:  # the library raises bare Exception for inconsistent vocabulary and merges
        raise ModelFileError(f"{file.path}: no tokenizer can be built from its metadata: {exc}. {_REMEDY}") from exc
    return backend


def special_token(file: GGUFFile, short: str) -> str | None:
    """Return the text of the token that the file names as "bos", "eos", "unknown" or "padding"."""
    token = file.metadata.get(f"tokenizer.ggml.{short}_token_id")
    tokens = file.metadata.get("tokenizer.ggml.tokens", [])
    return tokens[token] if isinstance(token, int) and token < len(tokens) else None


def chat_templates(file: GGUFFile) -> dict[str, str]:
    """Return name -> template; the main one is "default"."""
    templates = {}
    for name in file.metadata.get("tokenizer.chat_templates", []):
        source = file.metadata.get(f"tokenizer.chat_template.{name}")
        if source:
            templates[name] = source
    main = file.metadata.get("tokenizer.chat_template")
    return templates | ({"default": main} if main else {})


_REMEDY = "Give another tokenizer with --tokenizer FOLDER."


def _array(file: GGUFFile, key: str) -> list[Any]:
    values = file.metadata.get(key)
    if not isinstance(values, list) or not values:
        raise ModelFileError(f"{file.path} lacks the metadata {key}, which its tokenizer needs. {_REMEDY}")
    return values


def _byte_level(file: GGUFFile, tokens: list[str]) -> tuple[Tokenizer, bool]:
    rules = _rules(file)
    merges = [tuple(merge.split(" ", 1)) for merge in _array(file, "tokenizer.ggml.merges")]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    backend = Tokenizer(BPE(vocab=vocabulary, merges=merges, ignore_merges=rules.ignore_merges))
    if rules.normalizer is not None:
        backend.normalizer = rules.normalizer()
    backend.pre_tokenizer = rules.build()
    backend.decoder = decoders.ByteLevel()
    return backend, rules.add_bos


def _rules(file: GGUFFile) -> PreTokenizer:
    name = file.metadata.get("tokenizer.ggml.pre")
    if name is None:
        _log.warning(
            "%s does not say how it splits text into words (tokenizer.ggml.pre); GPT-2's rules are used. "
            "If answers look odd, convert the model again, or give --tokenizer FOLDER.",
            file.path,
        )
        name = "default"
    if name not in PRE_TOKENIZERS:
        raise ModelFileError(
            f"{file.path} splits text into words by the rules {name!r} (tokenizer.ggml.pre); known are: "
            f"{', '.join(PRE_TOKENIZERS)}. {_REMEDY}"
        )
    return PRE_TOKENIZERS[name]


def _sentencepiece(file: GGUFFile, tokens: list[str]) -> Tokenizer:
    """SentencePiece's BPE: the pair whose union has the highest score is merged first; unknown text becomes bytes."""
    scores = _array(file, "tokenizer.ggml.scores")
    kinds = _array(file, "tokenizer.ggml.token_type")
    vocabulary = {token: number for number, token in enumerate(tokens)}
    merges = merges_from_scores(
        {
            token: score
            for token, score, kind in zip(tokens, scores, kinds, strict=True)
            if kind in (_NORMAL, _USER_DEFINED)
        },
        vocabulary,
    )
    unknown = special_token(file, "unknown") or tokens[0]
    backend = Tokenizer(BPE(vocab=vocabulary, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    replace = normalizers.Replace(" ", _SPACE)
    undo = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if file.metadata.get("tokenizer.ggml.add_space_prefix", True):
        backend.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), replace])
        backend.decoder = decoders.Sequence([*undo, decoders.Strip(" ", 1, 0)])
    else:
        backend.normalizer = replace
        backend.decoder = decoders.Sequence(undo)
    return backend


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


def _add_special(file: GGUFFile, backend: Tokenizer, tokens: list[str]) -> None:
    kinds = file.metadata.get("tokenizer.ggml.token_type") or [_NORMAL] * len(tokens)
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind in (_CONTROL, _UNKNOWN)]
    own = [token for token, kind in zip(tokens, kinds, strict=True) if kind == _USER_DEFINED]
    backend.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in control])
    backend.add_tokens([AddedToken(token, normalized=False, special=False) for token in own])


def _add_ends(file: GGUFFile, backend: Tokenizer, tokens: list[str], add_bos: bool) -> None:
    single, special = ["$A"], []
    if file.metadata.get("tokenizer.ggml.add_bos_token", add_bos):
        bos = special_token(file, "bos")
        if bos is not None:
            single, special = [bos, *single], [(bos, tokens.index(bos))]
    if file.metadata.get("tokenizer.ggml.add_eos_token", False):
        eos = special_token(file, "eos")
        if eos is not None:
            single, special = [*single, eos], [*special, (eos, tokens.index(eos))]
    if special:
        backend.post_processor = TemplateProcessing(single=single, special_tokens=list(dict(special).items()))
