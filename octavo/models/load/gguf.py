"""Weights from a GGUF file, dequantized when read."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Set
from pathlib import Path

import numpy as np
import torch
from gguf import GGMLQuantizationType
from torch import Tensor

from octavo.core.errors import ModelFileError
from octavo.hub.gguf_families import is_paired
from octavo.hub.gguf_file import GGUFTensor, read_gguf
from octavo.models.load.gguf_blocks import CODES, EXPANDED, INTEGERS, SUPPORTED, as_blocks, dequantize
from octavo.nn.weights import Index, QuantizedBlocks, TensorSpec, part_of

log = logging.getLogger(__name__)


class GGUFCheckpoint:
    """One GGUF file: its tensors with llama.cpp's names, and the rows of queries and keys in Hugging Face's order.

    Raises:
        ModelFileError: the file is corrupt, truncated or not GGUF, or has an unsupported tensor type.
    """

    def __init__(self, path: Path) -> None:
        self.origin = str(path)
        file = read_gguf(path)
        self._tensors = file.tensors
        for tensor in self._tensors.values():
            _check_kind(tensor, path)
        _log_expanded(self._tensors.values())
        self._path = path
        self._heads = _permuted_heads(file.metadata, path)

    def names(self) -> Set[str]:
        return self._tensors.keys()

    def has(self, name: str) -> bool:
        return name in self._tensors

    def shape(self, name: str) -> tuple[int, ...] | None:
        return self._tensors[name].shape

    def tensor(self, name: str, spec: TensorSpec, index: Index | None = None) -> Tensor:
        tensor = self._tensors[name]
        shape = tensor.shape
        if index:
            # The first dimension can be selected before decoding, others only afterwards.
            rows = self._rows(name, index[0]).contiguous()
            shape = (rows.shape[0], *shape[1:])
        else:
            rows = self._rows(name)
        values = dequantize(rows, GGMLQuantizationType(tensor.kind), spec.dtype).view(shape)
        return values[(slice(None), *index[1:])] if index else values

    def blocks(
        self, name: str, entry: int | None = None, *, codes: bool = False, index: Index | None = None
    ) -> QuantizedBlocks | None:
        tensor = self._tensors[name]
        kind = GGMLQuantizationType(tensor.kind)
        if kind not in INTEGERS and not (codes and kind in CODES):
            return None
        if entry is None:
            return part_of(as_blocks(self._rows(name), kind), index)
        stacked = self._rows(name, slice(entry, entry + 1))
        return part_of(as_blocks(stacked.view(tensor.shape[1], -1), kind), index)

    def _rows(self, name: str, wanted: slice = slice(None)) -> Tensor:
        """Return a tensor's bytes [rows, bytes], or those of some rows, in Hugging Face's order. Read rather than
        mapped, because pages of a mapped file stay in this process's memory long after the tensor was converted."""
        tensor = self._tensors[name]
        heads = self._heads.get(name.rpartition(".")[0].rpartition(".")[2])
        first, last, _ = (slice(None) if heads else wanted).indices(tensor.shape[0])
        size = tensor.num_bytes // tensor.shape[0]
        data = np.fromfile(self._path, np.uint8, count=(last - first) * size, offset=tensor.offset + first * size)
        rows = torch.from_numpy(data).view(last - first, -1)
        return in_halves(rows, heads)[wanted] if heads else rows


def _check_kind(tensor: GGUFTensor, path: Path) -> None:
    kind = GGMLQuantizationType(tensor.kind)
    if kind not in SUPPORTED:
        known = ", ".join(sorted(kind.name for kind in SUPPORTED))
        raise ModelFileError(
            f"Tensor {tensor.name} in {path} is stored as {kind.name}; Octavo decodes {known}. "
            "Get the model in one of those."
        )


def _log_expanded(tensors: Iterable[GGUFTensor]) -> None:
    kinds = [GGMLQuantizationType(tensor.kind) for tensor in tensors]
    expanded = [kind.name for kind in kinds if kind in EXPANDED]
    if expanded:
        log.info("expanded %d of %d tensors: types %s", len(expanded), len(kinds), ", ".join(sorted(set(expanded))))


def _permuted_heads(metadata: Mapping[str, object], path: Path) -> dict[str, int]:
    """Return projection -> heads, for projections whose rows llama.cpp stores in pairs: q and k of some families.

    Its rope pairs adjacent channels there, while Hugging Face's pairs channel i with channel i + half.
    """
    arch = metadata.get("general.architecture")
    if not is_paired(arch):
        return {}
    heads = metadata.get(f"{arch}.attention.head_count")
    kv_heads = metadata.get(f"{arch}.attention.head_count_kv", heads)
    if isinstance(kv_heads, list):  # 0 in recurrent layers
        (kv_heads,) = set(kv_heads) - {0} or {0}
    if not isinstance(heads, int) or not isinstance(kv_heads, int) or heads < 1 or kv_heads < 1:
        raise ModelFileError(
            f"{path}: {arch}.attention.head_count is {heads!r} and head_count_kv {kv_heads!r}; "
            "Octavo needs one positive number each, the same for all layers."
        )
    return {"attn_q": heads, "attn_k": kv_heads}


def in_halves(rows: Tensor, heads: int) -> Tensor:
    """Reorder rows [heads * D, ...] with adjacent rotary pairs to rows with pairs D / 2 apart."""
    paired = rows.view(heads, -1, 2, rows.shape[1])
    return paired.transpose(1, 2).reshape(rows.shape)
