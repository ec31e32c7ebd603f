"""Activated LoRA (aLoRA): adapters that change a prompt only from their invocation tokens on, so that what comes before
shares the base model's KV.

Source: Greenewald et al. 2025, https://arxiv.org/abs/2504.12397; PEFT's `alora_invocation_tokens`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from octavo.core.errors import ModelFileError
from octavo.features.lora.layout import Manifest, Target


def activated_at(invocation: Sequence[int], prompt: Sequence[int]) -> int | None:
    """Return the position from which on an adapter changes a prompt: the last occurrence of its invocation tokens, or 0
    if it has none. None if it does not occur."""
    if not invocation:
        return 0
    size, first = len(invocation), invocation[0]
    starts = (i for i in range(len(prompt) - size, -1, -1) if prompt[i] == first)
    return next((i for i in starts if tuple(prompt[i : i + size]) == tuple(invocation)), None)


def invocation_of(fields: Mapping[str, Any], key: str, path: Path) -> tuple[int, ...]:
    """Return the invocation tokens that a file states; empty if it states none.

    Raises:
        ModelFileError: they are no token ids.
    """
    ids = fields.get(key)
    if ids is None:
        return ()
    if not isinstance(ids, list) or not ids or not all(type(one) is int and one >= 0 for one in ids):
        raise ModelFileError(
            f"{path}: {key} is {ids!r}; it must be a list of token ids, or be left out for an adapter that is always "
            "active."
        )
    return tuple(ids)


def check_activated(path: Path, manifest: Manifest, targets: Sequence[Target]) -> None:
    """Raise ModelFileError if an activated adapter has invocation tokens that the model lacks, or changes more than
    linear layers of the model's body, by additions: what else there is can't begin inside a prompt."""
    if not manifest.invocation:
        return
    size = next((target.parts[0].inputs for target in targets if target.embedding), None)
    odd = max(manifest.invocation)
    if size is not None and odd >= size:
        raise ModelFileError(
            f"{path}: token {odd} of its invocation tokens is out of vocabulary; the model has {size} tokens. Serve "
            "the base model that the adapter was made for."
        )
    for piece in manifest.pieces:
        target = targets[piece.target]
        if piece.gain or piece.replaces or target.embedding or target.head:
            raise ModelFileError(
                f"{path}: {target.name(piece.part)} is an embedding, a head, a saved module, or has magnitudes "
                "(use_dora), which an activated adapter (aLoRA) can't change in Octavo. Train it without that."
            )
