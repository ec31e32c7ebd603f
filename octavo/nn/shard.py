"""Sharding of a linear layer's parts over devices: declared by the model, applied while weights are loaded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

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
        if not self._divide(mesh.size):
            sizes = (size for size in range(1, heads + 1) if self._divide(size))
            raise ConfigError(
                f"--tensor-parallel-size {mesh.size}: {heads} attention heads on {kv_heads} kv heads can't be divided "
                f"over {mesh.size} devices. Of other numbers, the heads allow {', '.join(map(str, sizes))}."
            )
        return Heads(heads // mesh.size, max(1, kv_heads // mesh.size), self.head_dim, self.kv_dim)

    def _divide(self, size: int) -> bool:
        """Whether ranks get equally many heads, and equally many kv heads or one each."""
        return not self.heads % size and not (self.kv_heads % size and size % self.kv_heads)

    def own(self, part: int, mesh: Mesh) -> range:
        """Return a rank's features of q (part 0), k or v (part 1 or 2)."""
        mine = self.local(mesh)
        count = mine.heads if part == 0 else mine.kv_heads
        total = self.heads if part == 0 else self.kv_heads
        width = self.head_dim if part == 0 else self.kv_dim or self.head_dim
        first = mesh.rank * total // mesh.size
        return range(first * width, (first + count) * width)


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive features of one kind: `count` units, such as heads, of `width` features each. Each rank has an equal
    number of consecutive units; if there are fewer units than ranks, several ranks have the same one."""

    count: int
    width: int = 1

    @property
    def size(self) -> int:
        """The number of features."""
        return self.count * self.width

    def own(self, mesh: Mesh) -> range:
        """Return a rank's features, from the beginning of the run.

        Raises:
            ConfigError: they can't be divided evenly.
        """
        if self.count % mesh.size and mesh.size % self.count:
            raise ConfigError(
                f"--tensor-parallel-size {mesh.size}: {self.count} heads or groups can't be divided over {mesh.size} "
                "devices; use a number that divides them."
            )
        first, count = mesh.rank * self.count // mesh.size, max(1, self.count // mesh.size)
        return range(first * self.width, (first + count) * self.width)


@dataclass(frozen=True, slots=True)
class Runs:
    """Shards outputs of several kinds, each divided by its own units: the runs of each part, in order."""

    parts: tuple[tuple[Run, ...], ...]


COL, ROW, NONE = Shard.COL, Shard.ROW, Shard.NONE

AnyShard = Shard | Heads | Runs


@dataclass(frozen=True, slots=True)
class Cut:
    """The outputs and inputs of one part that a rank has, as ranges of features; None for all."""

    outputs: tuple[range, ...] | None = None
    inputs: range | None = None

    def pieces(self) -> list[Cut]:
        """Return cuts of one range of outputs each, which together are this one."""
        return [self] if self.outputs is None else [Cut((one,), self.inputs) for one in self.outputs]

    def num_outputs(self, features: int) -> int:
        """Return the number of outputs on this rank, of `features`."""
        return features if self.outputs is None else sum(map(len, self.outputs))

    def rows_of(self, matrix: Tensor) -> Tensor:
        """Return this rank's outputs of a matrix of all, [outputs, ...]; a view if they are consecutive."""
        if self.outputs is None:
            return matrix
        found = [matrix[one.start : one.stop] for one in self.outputs]
        return found[0] if len(found) == 1 else torch.cat(found)

    def index(self, spec: TensorSpec, out_features: int, in_features: int) -> Index | None:
        """Return the part of a stored tensor to read, for a cut of one range of outputs; None for all. Packed tensors
        have several features per element."""
        if self.outputs is None and self.inputs is None:
            return None
        outputs = None
        if self.outputs is not None:
            (outputs,) = self.outputs
        index = [slice(None)] * len(spec.shape)
        for kept, dim, features in (
            (outputs, spec.out_dim, out_features),
            (self.inputs, spec.in_dim, in_features),
        ):
            if kept is not None and dim is not None:
                index[dim] = slice(*(_scaled(edge, spec.shape[dim], features) for edge in (kept.start, kept.stop)))
        return tuple(index)


def cut(shard: AnyShard, part: int, out_features: int, in_features: int, mesh: Mesh) -> Cut:
    """Return the features of a layer's part that belong to a rank.

    Args:
        part: the part's index in the layer.

    Raises:
        ConfigError: they can't be divided evenly.
    """
    if mesh.size == 1 or shard is NONE:
        return Cut()
    if isinstance(shard, Heads):
        return Cut(outputs=(shard.own(part, mesh),))
    if isinstance(shard, Runs):
        return Cut(outputs=own_of_runs(shard.parts[part], mesh))
    return Cut(outputs=(share(out_features, mesh),)) if shard is COL else Cut(inputs=share(in_features, mesh))


def own_of_runs(runs: Sequence[Run], mesh: Mesh) -> tuple[range, ...]:
    """Return a rank's features of consecutive runs: a range of each."""
    found, first = [], 0
    for run in runs:
        own = run.own(mesh)
        found.append(range(first + own.start, first + own.stop))
        first += run.size
    return tuple(found)


def local_shape(shape: Sequence[int], index: Index | None) -> tuple[int, ...]:
    """Return the shape of an indexed tensor."""
    if index is None:
        return tuple(shape)
    return tuple(len(range(size)[part]) for size, part in zip(shape, index, strict=True))


def share(features: int, mesh: Mesh) -> range:
    """Return a rank's share of features that are divided equally.

    Raises:
        ConfigError: they can't be divided evenly.
    """
    if features % mesh.size:
        raise ConfigError(
            f"--tensor-parallel-size {mesh.size}: {features} features can't be divided over {mesh.size} devices; use a "
            "number that divides them."
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
