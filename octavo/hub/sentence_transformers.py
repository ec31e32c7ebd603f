"""Metadata of checkpoints in the format of sentence-transformers.

Format: https://sbert.net/docs/sentence_transformer/usage/custom_models.html
"""

from __future__ import annotations

from typing import Any

from octavo.hub.files import ModelFiles
from octavo.hub.json_file import read_json_if_there

MODULES = "modules.json"
SETTINGS = "config_sentence_transformers.json"
_KINDS = ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")


def is_sentence_transformer(files: ModelFiles) -> bool:
    """Return whether the checkpoint is declared as an embedding model."""
    return files.format == "safetensors" and (files.path / MODULES).is_file()


def model_settings(files: ModelFiles) -> dict[str, Any]:
    """Return what a checkpoint says of texts and scores: prompts, an activation; {} if it says nothing."""
    return read_json_if_there(files.path / SETTINGS) if files.format == "safetensors" else {}


def text_settings(files: ModelFiles) -> dict[str, Any]:
    """Return what a sentence-transformers model says of its tokenizer; {} if it says nothing."""
    if not is_sentence_transformer(files):
        return {}
    found = (read_json_if_there(files.path / f"sentence_{kind}_config.json") for kind in _KINDS)
    return next((one for one in found if one), {})


def max_sequence_length(files: ModelFiles) -> int | None:
    """Return the maximum number of tokens that a sentence-transformers model declares; None if it declares none."""
    value = text_settings(files).get("max_seq_length")
    return value if isinstance(value, int) and value > 0 else None
