"""Metadata of checkpoints in the format of sentence-transformers.

Format: https://sbert.net/docs/sentence_transformer/usage/custom_models.html
"""

from __future__ import annotations

from octavo.hub.files import ModelFiles
from octavo.hub.json_file import read_json_if_there

MODULES = "modules.json"


def is_sentence_transformer(files: ModelFiles) -> bool:
    """Return whether the checkpoint is declared as an embedding model."""
    return files.format == "safetensors" and (files.path / MODULES).is_file()


def max_sequence_length(files: ModelFiles) -> int | None:
    """Return the maximum number of tokens that a sentence-transformers model declares; None if it declares none."""
    if not is_sentence_transformer(files):
        return None
    names = ("sentence_bert_config.json", "sentence_roberta_config.json", "sentence_distilbert_config.json")
    for name in (*names, "sentence_xlm-roberta_config.json"):
        value = read_json_if_there(files.path / name).get("max_seq_length")
        if isinstance(value, int) and value > 0:
            return value
    return None
