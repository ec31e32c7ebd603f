"""Where the weights of an adapter are in the blocks that it holds. No torch here; both halves compute it alike.

An adapter holds blocks of the KV cache as a sequence does. Concatenated in the adapter's order they are its range of
bytes, which is also the form of its copy in host memory:

    byte b of the range = byte b % slice_bytes of slice (b // slice_bytes) % slices of block blocks[b // block_bytes]

A block has `slices` parts of `slice_bytes`: one for each layer of a cache group, since the cache is one tensor
[slices, blocks, slice_bytes]. The range runs through all slices of a block before it continues in the next block, so
any mixture of layers fills its blocks to the last one.

The range holds rows, one after the other, each from a tile boundary on. A tile is the largest power of two that divides
`slice_bytes`, at most 512 bytes, so no tile is divided between slices or blocks. All offsets count tiles. The rows of a
piece (one projection of one layer), in this order:

- `rank` rows of A, `inputs` elements each: row i is A[i];
- B, in one of two forms (`Geometry.by_output`). CPUs have `rank` rows of B transposed, `outputs` elements each: row i
  is B[:, i]. GPUs have B as files have it, in one row of `outputs * stride` elements: B[n, i] is element
  n * stride + i. The stride is the rank rounded up to a power of two, and elements past the rank are 0. The adapter's
  scale is in B or in A;
- if it has gains (DoRA): one row of `outputs` float32, the factors of all outputs;
- if it is whole (a saved module): `outputs` rows of `inputs` elements, in place of all the above. A saved embedding
  table has `inputs` rows of `outputs` elements, since its inputs are token ids;
- if it has rows of single tokens: these in place of all the above, of the model's hidden size each.

So a piece takes memory for its own rank, whatever the ranks of others. Elements are of the model's dtype. Under
tensor parallelism a rank has its own features of each row (`own_inputs`, `own_outputs`), as many on each rank. In a
pipeline, a stage has the pieces of its own layers; the adapter takes as many blocks as the stage that has most of it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property

import msgspec

from octavo.core.errors import ConfigError

MAX_TILE = 512
"""Most bytes of a tile."""
_MIN_TILE = 16
_GAIN_BYTES = 4
_LEAST_STRIDE = 8


class StoredPart(msgspec.Struct, frozen=True):
    """The module of the checkpoint that holds a projection; adapters are trained on it, and have its name.

    Attributes:
        name: its full path.
        begin, end, run: its outputs [begin, end) of each `run` are those of the projection; run 0 for all.
    """

    name: str
    begin: int = 0
    end: int = 0
    run: int = 0

    def outputs(self, own: int) -> int:
        """Return the number of outputs of the module, given those of the projection."""
        return own // (self.end - self.begin) * self.run if self.run else own


class StackedPart(StoredPart, frozen=True):
    """The tensor that holds a projection of all experts, in its first dimension.

    Attributes:
        transposed: each expert's matrix is [inputs, outputs].
    """

    transposed: bool = False


class TargetPart(msgspec.Struct, frozen=True):
    """One projection of a target, as the model names it.

    Attributes:
        name: last part of its path; "" if the target's path is the whole.
        inputs, outputs: features of the whole projection. An embedding's inputs are the token ids.
        own_inputs, own_outputs: those of one rank.
        stored: where the checkpoint has it; None if it has the same name and rows there.
        stack: of an expert's projection, where Transformers has it; None if it is on its own.
    """

    name: str
    inputs: int
    outputs: int
    own_inputs: int
    own_outputs: int
    stored: StoredPart | None = None
    stack: StackedPart | None = None


class Target(msgspec.Struct, frozen=True):
    """A layer that adapters can change: projections of the same input, computed in one product.

    Attributes:
        path: its place in the model; a part's full name is `path.name`.
        embedding: it maps token ids to vectors.
        head: it maps the states of the tokens that get logits.
        late: it comes after the last attention and computes only the chosen tokens of a step, if some are chosen
            (`StepInput.hidden_rows`).
        expert: index of the expert whose product it is; -1 for a layer of its own.
        tied: a head whose weights are the embedding's table.
    """

    path: str
    parts: tuple[TargetPart, ...]
    embedding: bool = False
    head: bool = False
    late: bool = False
    expert: int = -1
    tied: bool = False

    def name(self, part: int) -> str:
        """Return a part's full name, in the model's names."""
        return ".".join(filter(None, (self.path, self.parts[part].name)))

    def stored(self, part: int) -> StoredPart:
        """Return where the checkpoint has a part."""
        return self.parts[part].stored or StoredPart(self.name(part))


class Piece(msgspec.Struct, frozen=True):
    """What an adapter has for one part of a target.

    Attributes:
        target: index of the target.
        part: index of its part.
        rank: of the low-rank matrices; 0 for a saved module.
        scale: factor of B.
        gain: it has a factor for each output (DoRA).
        whole: it replaces the weights (a saved module).
        rows: of a saved module, which may have more tokens than the base's; 0 for as many.
        tokens: ids whose rows it replaces in an embedding or a head, or adds to it; empty if it is of another kind.
    """

    target: int
    part: int
    rank: int = 0
    scale: float = 1.0
    gain: bool = False
    whole: bool = False
    rows: int = 0
    tokens: tuple[int, ...] = ()

    @property
    def replaces(self) -> bool:
        """Whether it takes the place of weights, so that it can't be weighted or summed."""
        return self.whole or bool(self.tokens)


class Manifest(msgspec.Struct, frozen=True):
    """What an adapter has.

    Attributes:
        pieces: ordered by target and part.
        invocation: tokens that activate it, see `activation.py`; empty if it is always active.
    """

    pieces: tuple[Piece, ...]
    invocation: tuple[int, ...] = ()

    def among(self, targets: Collection[int]) -> Manifest:
        """Return what it has for these targets."""
        return msgspec.structs.replace(self, pieces=tuple(piece for piece in self.pieces if piece.target in targets))

    def added_tokens(self, targets: Sequence[Target]) -> int:
        """Return how many tokens it adds to the vocabulary."""
        return max((added_by(piece, targets[piece.target]) for piece in self.pieces), default=0)

    @property
    def max_rank(self) -> int:
        return max((piece.rank for piece in self.pieces), default=0)

    def general(self, targets: Sequence[Target]) -> bool:
        """Return whether it has more than low-rank additions to linear layers and experts."""
        return any(piece.gain or piece.replaces or targets[piece.target].embedding for piece in self.pieces)

    def changes_experts(self, targets: Sequence[Target]) -> bool:
        return any(targets[piece.target].expert >= 0 for piece in self.pieces)

    def changes_keys(self, targets: Sequence[Target]) -> bool:
        """Return whether keys or values depend on the adapter; if not, its requests share the base's prefixes."""
        changed = (targets[piece.target] for piece in self.pieces)
        return not all(target.head or target.late for target in changed)


def added_by(piece: Piece, target: Target) -> int:
    """Return how many rows a piece adds to an embedding or a head."""
    if not piece.replaces:
        return 0
    part = target.parts[piece.part]
    end = max((piece.rows, *(token + 1 for token in piece.tokens)))
    return max(0, end - (part.inputs if target.embedding else part.outputs))


@dataclass(frozen=True)
class Geometry:
    """Blocks of the KV cache as bytes.

    Attributes:
        slices: parts of a block, each in another place.
        slice_bytes: bytes of each.
        element_size: bytes of an adapter's element.
        by_output: an output's elements of B lie together, as in files; else those of a rank.

    Raises:
        ConfigError: the slices are too uneven for rows of adapters.
    """

    slices: int
    slice_bytes: int
    element_size: int
    by_output: bool = False

    def __post_init__(self) -> None:
        if self.slices < 1 or self.tile_bytes < _MIN_TILE:
            raise ConfigError(
                f"Adapters need blocks of the KV cache in multiples of {_MIN_TILE} bytes; a block has {self.slices} "
                f"parts of {self.slice_bytes}. Set --block-size to a multiple of 16."
            )

    @property
    def block_bytes(self) -> int:
        return self.slices * self.slice_bytes

    @cached_property
    def tile_bytes(self) -> int:
        return min(self.slice_bytes & -self.slice_bytes, MAX_TILE)

    @property
    def slice_tiles(self) -> int:
        """Tiles of one slice of a block."""
        return self.slice_bytes // self.tile_bytes

    @property
    def block_tiles(self) -> int:
        return self.slices * self.slice_tiles

    def row_tiles(self, elements: int) -> int:
        """Return the tiles of a row of this many elements."""
        return -(-elements * self.element_size // self.tile_bytes)

    def stride(self, rank: int) -> int:
        """Return the elements from one output of B to the next, in the form `by_output`: a power of two, so that no
        output's elements are divided between tiles."""
        return max(_LEAST_STRIDE, 1 << max(0, rank - 1).bit_length())

    def b_tiles(self, rank: int, outputs: int) -> int:
        """Return the tiles of B."""
        if self.by_output:
            return self.row_tiles(outputs * self.stride(rank))
        return rank * self.row_tiles(outputs)


@dataclass(frozen=True, slots=True)
class Share:
    """What a rank keeps of each adapter.

    Attributes:
        geometry: of its blocks.
        own: indices of the targets that it computes.
    """

    geometry: Geometry
    own: frozenset[int]


class Span(msgspec.Struct, frozen=True):
    """The place of a piece, in tiles from the start of the adapter's range; -1 for what it does not have.

    Attributes:
        a, b: first row of A, and B.
        rank: rows of A.
        gain: the row of gains.
        whole: first row of a saved module.
        rows: their number.
        row: the first of the rows of `tokens`.
    """

    a: int = -1
    b: int = -1
    rank: int = 0
    gain: int = -1
    whole: int = -1
    rows: int = 0
    row: int = -1
    tokens: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Layout:
    """The places of all pieces of an adapter.

    Attributes:
        spans: (target, part) -> its place.
        num_tiles: of the adapter's range.
        num_blocks: blocks that it takes.
    """

    geometry: Geometry
    spans: dict[tuple[int, int], Span]
    num_tiles: int

    @property
    def num_blocks(self) -> int:
        return -(-self.num_tiles // self.geometry.block_tiles)


def layout(targets: Sequence[Target], manifest: Manifest, geometry: Geometry) -> Layout:
    """Place an adapter's rows, in the order of the manifest."""
    spans: dict[tuple[int, int], Span] = {}
    sizes: dict[tuple[int, int, int], tuple[int, int]] = {}  # of A and B: most layers have the same
    end = 0
    for piece in manifest.pieces:
        target = targets[piece.target]
        part = target.parts[piece.part]
        if piece.replaces:
            row = geometry.row_tiles(part.own_outputs if target.embedding else part.own_inputs)
            if piece.whole:
                rows = piece.rows or (part.own_inputs if target.embedding else part.own_outputs)
                spans[piece.target, piece.part] = Span(whole=end, rows=rows)
            else:
                rows = len(piece.tokens)
                spans[piece.target, piece.part] = Span(row=end, tokens=piece.tokens)
            end += rows * row
            continue
        form = piece.rank, part.own_inputs, part.own_outputs
        if form not in sizes:
            inputs = geometry.row_tiles(part.own_inputs)
            sizes[form] = piece.rank * inputs, geometry.b_tiles(piece.rank, part.own_outputs)
        of_a, of_b = sizes[form]
        a, b = end, end + of_a
        end = b + of_b
        gain = -1
        if piece.gain:
            gain, end = end, end + -(-part.own_outputs * _GAIN_BYTES // geometry.tile_bytes)
        spans[piece.target, piece.part] = Span(a, b, piece.rank, gain)
    return Layout(geometry, spans, end)


def most_blocks(targets: Sequence[Target], manifest: Manifest, shares: Collection[Share]) -> int:
    """Return the blocks that an adapter takes: those of the rank that keeps most of it."""
    return max(layout(targets, manifest.among(share.own), share.geometry).num_blocks for share in shares)


def joined(manifests: Sequence[Manifest]) -> Manifest:
    """Return the manifest of a sum of several adapters: ranks add up, and the adapters' scales go into their
    matrices.

    Only for adapters without gains, saved modules and invocation tokens, whose changes are no sums.
    """
    ranks: dict[tuple[int, int], int] = {}
    for manifest in manifests:
        assert not manifest.invocation, "activated adapters begin at different tokens"
        for piece in manifest.pieces:
            assert not piece.gain, "gains do not add up"
            assert not piece.replaces, "saved modules do not add up"
            place = piece.target, piece.part
            ranks[place] = ranks.get(place, 0) + piece.rank
    return Manifest(tuple(Piece(*place, rank=rank) for place, rank in sorted(ranks.items())))


def largest(targets: Sequence[Target], rank: int, geometry: Geometry, added_tokens: int = 0) -> int:
    """Return the most blocks that an adapter of this rank can take, with gains on all linear layers, and saved
    embeddings and heads with `added_tokens` more rows than the model's."""
    tiles = 0
    for i, target in enumerate(targets):
        for j in range(len(target.parts)):
            forms = [Piece(i, j, rank, gain=True)]
            if target.embedding or target.head:
                part = target.parts[j]
                rows = (part.own_inputs if target.embedding else part.own_outputs) + added_tokens
                forms.append(Piece(i, j, whole=True, rows=rows))
            tiles += max(layout(targets, Manifest((form,)), geometry).num_tiles for form in forms)
    return -(-tiles // geometry.block_tiles)
