"""The keys of a GGUF file that hold its tokenizer, made from Hugging Face's files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from octavo.core.errors import ConfigError
from octavo.text.tokenizers.gguf_models import CONTROL, NORMAL, UNUSED, USER_DEFINED
from octavo.text.tokenizers.pretokenizers import PRE_TOKENIZERS, PreTokenizer

_PROBE = (
    "Hello, World! I'll pay 1234567 for it.\n\n  def f(x):\n\treturn x+1  # ok...   "
    "Gr\u00fc\u00dfe, e\u0301 \u65e5\u672c \u0438 \u043c\u0438\u0440'S 3\u00bd \uff21\uff22 camelCase HTTPServer  \r\n"
)
"""A text that rules of different models cut at different places."""
_MARKS = {
    "bos_token": "bos",
    "eos_token": "eos",
    "unk_token": "unknown",
    "sep_token": "seperator",
    "pad_token": "padding",
}
"""Field of tokenizer_config.json -> key; "seperator" is spelled so in the format."""


def tokenizer_keys(folder: Path, vocab_size: int) -> dict[str, Any]:
    """Return the keys below "tokenizer." with their values.

    Args:
        folder: with tokenizer.json, and tokenizer_config.json if there is one.
        vocab_size: rows of the embeddings; numbers without a token become unused ones.

    Raises:
        ConfigError: there is no tokenizer.json, or it is no byte-level BPE with rules that GGUF has a name for.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ConfigError(f"{folder} has no tokenizer.json, which a GGUF file needs. Get the model's tokenizer.")
    stored, backend = json.loads(path.read_text(encoding="utf-8")), Tokenizer.from_file(str(path))
    model = stored["model"]
    if model.get("type") != "BPE" or model.get("byte_fallback"):
        raise ConfigError(
            f"{path} is a tokenizer of the kind {model.get('type')} over pieces; octavo quantize writes byte-level BPE "
            "to GGUF files. Convert the model with llama.cpp's convert_hf_to_gguf.py, and quantize that file."
        )
    added = {entry["id"]: entry for entry in stored.get("added_tokens", [])}
    texts = {number: text for text, number in backend.get_vocab(with_added_tokens=True).items()}
    size = max(vocab_size, max(texts) + 1)
    keys: dict[str, Any] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": _name_of(backend, bool(model.get("ignore_merges")), path),
        "tokenizer.ggml.tokens": [texts.get(number, f"[PAD{number}]") for number in range(size)],
        "tokenizer.ggml.token_type": [_kind(number, texts, added) for number in range(size)],
        "tokenizer.ggml.merges": [one if isinstance(one, str) else " ".join(one) for one in model["merges"]],
    }
    return keys | _marks(folder, backend)


def _kind(number: int, texts: dict[int, str], added: dict[int, dict[str, Any]]) -> int:
    if number not in texts:
        return UNUSED
    if number not in added:
        return NORMAL
    return CONTROL if added[number]["special"] else USER_DEFINED


def _marks(folder: Path, backend: Tokenizer) -> dict[str, Any]:
    """Return the numbers of special tokens, which of them prompts begin and end with, and the chat template."""
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    keys: dict[str, Any] = {}
    for field, short in _MARKS.items():
        text = config.get(field)
        number = backend.token_to_id(text["content"] if isinstance(text, dict) else text) if text else None
        if number is not None:
            keys[f"tokenizer.ggml.{short}_token_id"] = number
    ids = backend.encode("a").ids
    for short, mark in (("bos", ids[0]), ("eos", ids[-1])):
        keys[f"tokenizer.ggml.add_{short}_token"] = mark == keys.get(f"tokenizer.ggml.{short}_token_id")
    template = folder / "chat_template.jinja"
    text = template.read_text(encoding="utf-8") if template.is_file() else config.get("chat_template")
    return keys | ({"tokenizer.chat_template": text} if isinstance(text, str) else {})


def _name_of(backend: Tokenizer, ignore_merges: bool, path: Path) -> str:
    """Return the name of the rules that cut and normalize a text as the tokenizer does.

    Raises:
        ConfigError: there are none.
    """
    for name, rules in PRE_TOKENIZERS.items():
        if name != "default" and rules.ignore_merges == ignore_merges and _cuts(rules) == _pieces(backend):
            return name
    raise ConfigError(
        f"{path} cuts texts by rules that Octavo knows no name of in GGUF files. Convert the model with llama.cpp's "
        "convert_hf_to_gguf.py, and quantize that file."
    )


def _cuts(rules: PreTokenizer) -> list[str]:
    text = _PROBE if rules.normalizer is None else rules.normalizer().normalize_str(_PROBE)
    return [piece for piece, _ in rules.build().pre_tokenize_str(text)]


def _pieces(backend: Tokenizer) -> list[str]:
    text = _PROBE if backend.normalizer is None else backend.normalizer.normalize_str(_PROBE)
    splitter = backend.pre_tokenizer
    return [] if splitter is None else [piece for piece, _ in splitter.pre_tokenize_str(text)]
