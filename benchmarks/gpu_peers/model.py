"""The model that is compared: a real model's shape, random weights, and a tokenizer of made-up words.

Servers turn tokens into text, so they need a tokenizer; with random weights any will do. Each token is a word of its
own in plain ASCII, so that every token becomes text at once.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

_BEGIN, _END = "<|begin_of_text|>", "<|end_of_text|>"


def prepare(shape: Path, folder: Path) -> Path:
    """Write `shape`'s config.json and a tokenizer for its vocabulary into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(shape / "config.json", folder / "config.json")
    config = json.loads((shape / "config.json").read_text(encoding="utf-8"))
    begin, end = _special_ids(config)
    _write(folder / "tokenizer.json", _tokenizer(config["vocab_size"], {begin: _BEGIN, end: _END}))
    _write(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": _BEGIN,
            "eos_token": _END,
            "clean_up_tokenization_spaces": False,
        },
    )
    return folder


def vocab_size(folder: Path) -> int:
    size: int = json.loads((folder / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    return size


def _special_ids(config: dict[str, Any]) -> tuple[int, int]:
    """Ids of begin and end; where they are the same or unknown, the last two of the vocabulary."""
    end = config.get("eos_token_id")
    end = end[0] if isinstance(end, list) else end
    begin = config.get("bos_token_id")
    if begin is None or end is None or begin == end:
        return config["vocab_size"] - 2, config["vocab_size"] - 1
    return begin, end


def _tokenizer(size: int, special: dict[int, str]) -> dict[str, Any]:
    # U+0120 is how byte-level tokenizers write a space.
    words = {special.get(number, f"\u0120t{number}"): number for number in range(size)}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    added = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": number, "content": text, **added} for number, text in sorted(special.items())],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": words,
            "merges": [],
        },
    }


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content) + "\n", encoding="utf-8")
