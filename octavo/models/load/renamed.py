"""Checkpoints with other tensor names than the model's."""

from __future__ import annotations

from collections.abc import Callable, Set

from torch import Tensor

from octavo.hub.gguf_names import bert_name, is_gguf
from octavo.hub.text_names import in_text_half
from octavo.models.load.checkpoint import Checkpoint
from octavo.nn.weights import Index, QuantizedBlocks, TensorSpec


class RenamedCheckpoint:
    """A view of `source` in which each tensor has the name `rename(name)`, without those for which that is None."""

    def __init__(self, source: Checkpoint, rename: Callable[[str], str | None]) -> None:
        self.origin = source.origin
        self._source = source
        self._stored = {new: name for name in source.names() if (new := rename(name)) is not None}

    def names(self) -> Set[str]:
        return self._stored.keys()

    def has(self, name: str) -> bool:
        return name in self._stored

    def shape(self, name: str) -> tuple[int, ...] | None:
        return self._source.shape(self._stored[name])

    def blocks(
        self, name: str, entry: int | None = None, *, codes: bool = False, index: Index | None = None
    ) -> QuantizedBlocks | None:
        return self._source.blocks(self._stored[name], entry, codes=codes, index=index)

    def tensor(self, name: str, spec: TensorSpec, index: Index | None = None) -> Tensor:
        return self._source.tensor(self._stored[name], spec, index)


def with_text_half(checkpoint: Checkpoint) -> Checkpoint:
    """Return the text half of a checkpoint of a model with images, with the names of a text model's checkpoint."""
    return RenamedCheckpoint(checkpoint, in_text_half) if checkpoint.names() else checkpoint


def with_root(checkpoint: Checkpoint, root: str) -> Checkpoint:
    """Return the checkpoint with names that begin with `root.`, which are missing if it has the bare model only."""
    names = checkpoint.names()
    if not names or any(name.startswith(f"{root}.") for name in names):
        return checkpoint
    return RenamedCheckpoint(checkpoint, lambda name: name if name.startswith("lm_head.") else f"{root}.{name}")


def with_modern_norms(checkpoint: Checkpoint) -> Checkpoint:
    """Return the checkpoint with norms' `weight` and `bias`, which the oldest checkpoints call gamma and beta."""
    if not any(name.endswith((".gamma", ".beta")) for name in checkpoint.names()):
        return checkpoint
    return RenamedCheckpoint(checkpoint, _modern)


def with_bert_names(checkpoint: Checkpoint) -> Checkpoint:
    """Return the checkpoint of an encoder with BERT's names in place of llama.cpp's."""
    return RenamedCheckpoint(checkpoint, bert_name) if is_gguf(checkpoint.names()) else checkpoint


def _modern(name: str) -> str:
    for old, new in ((".gamma", ".weight"), (".beta", ".bias")):
        if name.endswith(old):
            return name.removesuffix(old) + new
    return name
