"""Sharding of a linear layer's parts over devices: declared by the model, applied while weights are loaded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from octavo.core.errors import ConfigError
from octavo.nn.weights import Index, TensorSpec
from octavo.parallel.mesh import Mesh


class Shard(Enum):
    """COL shards outputs, ROW shards inputs (partial results must be summed), NONE keeps the layer whole."""

    COL = "col"
    ROW = "row"
    NONE = "none"


@dataclass(frozen=True, slots=True)
class Heads:
    """Shards outputs by whole attention heads: the first part has `heads` of them, the others `kv_heads`.

    If there are fewer kv heads than ranks, several ranks have the same one.

    Attributes:
        kv_dim: channels of a kv head; 0 for `head_dim`.
    """

    heads: int
    kv_heads: int
    head_dim: int
    kv_dim: int = 0

    @property
    def outputs(self) -> tuple[int, int, int]:
        """Return the output features of q, k and v."""
        kept = self.kv_heads * (self.kv_dim or self.head_dim)
        return self.heads * self.head_dim, kept, kept

    def local(self, mesh: Mesh) -> Heads:
        """Return the heads of one rank.

        Raises:
            ConfigError: they can't be divided evenly.
        """
        heads, kv_heads = self.heads, self.kv_heads
        if heads % mesh.size or (kv_heads % mesh.size and mesh.size % kv_heads):
            raise ConfigError(
                f"{heads} attention heads on {kv_heads} kv heads can't be divided over {mesh.size} devices. Use a "
                "number of devices that divides the heads, and divides the kv heads or is a multiple of them."
            )
        return Heads(heads // mesh.size, max(1, kv_heads // mesh.size), self.head_dim, self.kv_dim)


COL, ROW, NONE = Shard.COL, Shard.ROW, Shard.NONE


@dataclass(frozen=True, slots=True)
class Cut:
    """The outputs and inputs of one part that a rank has, as ranges of features; None for all."""

    outputs: range | None = None
    inputs: range | None = None

    def index(self, spec: TensorSpec, out_features: int, in_features: int) -> Index | None:
        """Return the part of a stored tensor to read; None for all. Packed tensors have several features per
        element."""
        if self.outputs is None and self.inputs is None:
            return None
        index = [slice(None)] * len(spec.shape)
        for kept, dim, features in (
            (self.outputs, spec.out_dim, out_features),
            (self.inputs, spec.in_dim, in_features),
        ):
            if kept is not None and dim is not None:
                index[dim] = slice(*(_scaled(edge, spec.shape[dim], features) for edge in (kept.start, kept.stop)))
        return tuple(index)


def cut(shard: Shard | Heads, part: int, out_features: int, in_features: int, mesh: Mesh) -> Cut:
    """Return the features of a layer's part that belong to a rank.

    Args:
        part: the part's index in the layer.

    Raises:
        ConfigError: they can't be divided evenly.
    """
    if mesh.size == 1 or shard is NONE:
        return Cut()
    if isinstance(shard, Heads):
        mine = shard.local(mesh)
        count = mine.heads if part == 0 else mine.kv_heads
        total = shard.heads if part == 0 else shard.kv_heads
        width = shard.head_dim if part == 0 else shard.kv_dim or shard.head_dim
        first = mesh.rank * total // mesh.size
        return Cut(outputs=range(first * width, (first + count) * width))
    return Cut(outputs=_share(out_features, mesh)) if shard is COL else Cut(inputs=_share(in_features, mesh))


def local_shape(shape: Sequence[int], index: Index | None) -> tuple[int, ...]:
    """Return the shape of an indexed tensor."""
    if index is None:
        return tuple(shape)
    return tuple(len(range(size)[part]) for size, part in zip(shape, index, strict=True))


def _share(features: int, mesh: Mesh) -> range:
    if features % mesh.size:
        raise ConfigError(
            f"{features} features can't be divided over {mesh.size} devices; use a number that divides them."
        )
    size = features // mesh.size
    return range(mesh.rank * size, (mesh.rank + 1) * size)


def _scaled(edge: int, stored: int, features: int) -> int:
    """Return a feature's index among the stored elements of a dimension."""
    place, rest = divmod(edge * stored, features)
    if rest:
        raise ConfigError(
            f"Weights of {features} features packed in {stored} elements can't be cut at feature {edge}. Use fewer "
            "devices, or weights that are packed in smaller groups."
        )
    return place
