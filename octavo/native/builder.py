"""`ProgramBuilder`: collects the operations of a forward pass, and the buffers between them."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field

from octavo.native.bindings import CODES, EXTERNALS, Dtype, Epilogue, Function, LowRank, Op, OpKind
from octavo.native.exchange import Exchange

RESIDUAL, LOGITS, ATTENDED = range(EXTERNALS)
"""The buffers that the caller owns: the residual stream [T, hidden] float32, the head's output [T, vocab], and the
output of the last layer's attention."""

_ALIGNMENT = 64
BLOCK = 32
"""Values that share a scale, in integer weights and activations."""


def row_bytes(dtype: Dtype, columns: int, planes: int = 1) -> int:
    """Return the bytes of a row of activations: values, and for integers each block's scale and sums."""
    if dtype is Dtype.INT8:
        return columns * planes + columns // BLOCK * 12
    return columns * (2 if dtype is Dtype.BFLOAT else 4)


@dataclass(frozen=True, slots=True)
class NormArgs:
    """A norm over `size` values, a multiple of 16.

    Attributes:
        weight, bias: addresses of float32 [size], or [groups, size] with `own_weights`; 0 for none.
        centered: it is a LayerNorm. Otherwise an RMSNorm, which has a weight and no bias.
        own_weights: each group of `ProgramBuilder.norm_groups` has weights of its own.
    """

    size: int
    eps: float
    weight: int
    bias: int = 0
    centered: bool = False
    own_weights: bool = False


@dataclass(frozen=True, slots=True)
class Results:
    """What a product's results become: `function` of `scale` times each, then written by `epilogue`.

    Attributes:
        dtype: of what is written, FLOAT or BFLOAT. BFLOAT needs the epilogue GATE, or a function.
        limit: of the functions CAP and CLIP.
        curve: address of the parameters of XIELU (`nn/xielu.py`).
    """

    epilogue: Epilogue = Epilogue.STORE
    dtype: Dtype = Dtype.FLOAT
    function: Function = Function.PLAIN
    scale: float = 1.0
    limit: float = 0.0
    curve: int = 0


STORED = Results()


def activated(activation: str, dtype: Dtype, *, gated: bool) -> Results:
    """Return the results of a feed-forward's first product: activation(gate) * up if gated, else activation(up).

    Args:
        activation: a name of `nn/ops/activation.py`.
    """
    function = Function[activation.upper()]
    if gated and function is Function.SILU:
        function = Function.PLAIN  # the register tile computes it
    return Results(Epilogue.GATE if gated else Epilogue.STORE, dtype, function)


@dataclass(slots=True)
class ProgramBuilder:
    """Collects operations and the buffers between them, which have one or more rows per token.

    Pointers are addresses of memory that must outlive the program. Norm weights and biases are float32, biases padded
    with zeros to whole panels of 16.

    Attributes:
        widths, rows: bytes of a row of each buffer, and its rows per token.
        planes: bytes of an integer activation, 1 or 2; 0 if integer weights are multiplied with bfloat16 activations.
        wide: dtype of activations for weights that are codes, FLOAT or BFLOAT.
        marks: name -> number of operations before it: places where a caller may interrupt the program.
        kept: objects that must outlive the program, since operations point to them.
        nested: products that other operations run.
        exchange: between ranks; None if no operation uses it.
    """

    ops: list[Op]
    widths: list[int]
    rows: list[int]
    planes: int = 1
    wide: Dtype = Dtype.FLOAT
    marks: dict[str, int] = field(default_factory=dict)
    kept: list[object] = field(default_factory=list)
    nested: list[ctypes.Array[Op]] = field(default_factory=list)
    exchange: Exchange | None = None
    _scratch: dict[str, int] = field(default_factory=dict)

    @classmethod
    def make(cls, hidden_bytes: int, logits_bytes: int, planes: int = 1, attended_bytes: int = 0) -> ProgramBuilder:
        """Create a builder with the external buffers, whose rows have these sizes in bytes."""
        return cls([], [hidden_bytes, logits_bytes, attended_bytes], [1] * EXTERNALS, planes)

    def buffer(self, row_bytes: int, rows: int = 1) -> int:
        """Add a buffer with this number of rows per token, which start on cache lines; return its index."""
        self.widths.append(_aligned(row_bytes))
        self.rows.append(rows)
        return len(self.widths) - 1

    def scratch(self, name: str, row_bytes: int, rows: int = 1) -> int:
        """Return the index of the buffer with this name, which all layers share, with at least this number of rows per
        token, of at least `row_bytes`."""
        if name not in self._scratch:
            self._scratch[name] = self.buffer(row_bytes, rows)
        found = self._scratch[name]
        self.widths[found] = max(self.widths[found], _aligned(row_bytes))
        self.rows[found] = max(self.rows[found], rows)
        return found

    def inner(self) -> ProgramBuilder:
        """Return a builder of operations on the same buffers, for `nest`."""
        return ProgramBuilder([], self.widths, self.rows, self.planes, self.wide, _scratch=self._scratch)

    def nest(self, inner: ProgramBuilder) -> int:
        """Keep the products of an inner builder for an operation that runs them; return their address."""
        self.nested.append((Op * len(inner.ops))(*inner.ops))
        return ctypes.addressof(self.nested[-1])

    def mark(self, name: str) -> None:
        """Mark the place before the next operation; a later mark of the same name replaces it."""
        self.marks[name] = len(self.ops)

    def meets(self, weights: Dtype) -> Dtype:
        """Return the dtype of the activations that weights of this dtype are multiplied with."""
        if weights in CODES:
            return self.wide
        if weights not in (Dtype.INT8, Dtype.INT4):
            return weights
        return Dtype.INT8 if self.planes else Dtype.BFLOAT

    def embed(
        self,
        weight: int,
        dtype: Dtype,
        columns: int,
        output: int,
        *,
        packed: bool,
        zero_point: int = 0,
        minima: bool = False,
        scale: float = 1.0,
        book: int = 0,
        group: int = 0,
        own: range | None = None,
    ) -> None:
        """Add an operation: look up rows of a table [V, columns] by token, plain or packed in panels, as float32 times
        `scale`.

        Args:
            own: the tokens that the table has; the rows of others are zero. None for all.
        """
        self.add(
            OpKind.EMBED,
            dtype,
            0,
            output,
            columns=columns,
            weight=weight,
            packed=int(packed),
            zero_point=zero_point,
            minima=int(minima),
            scale=scale,
            book=book,
            scaled=group,
            begin=0 if own is None else own.start,
            rows=0 if own is None else len(own),
        )

    def add_positions(self, weight: int, dtype: Dtype, columns: int, output: int) -> None:
        """Add an operation: add rows of a plain table [positions, columns], by position, to float32 rows."""
        places: dict[str, int | float] = {"epilogue": Epilogue.ADD, "by_position": 1, "scale": 1.0}
        self.add(OpKind.EMBED, dtype, 0, output, columns=columns, weight=weight, **places)

    def norm(
        self,
        source: int,
        output: int,
        dtype: Dtype,
        norm: NormArgs,
        *,
        zero_point: int = 0,
        add: float | None = None,
    ) -> None:
        """Add an operation: the norm of float32 rows, to float32, bfloat16, or integers as `quantize`.

        Args:
            add: a factor, to add its product with the normalized rows to the output, which is float32; None to store
                them.
        """
        epilogue = Epilogue.STORE if add is None else Epilogue.ADD
        self._norm(source, output, dtype, norm, zero_point=zero_point, epilogue=epilogue, scale=add or 0.0, groups=1)

    def norm_groups(self, buffer: int, norm: NormArgs, begin: int, groups: int) -> None:
        """Add an operation: normalize `groups` times `size` adjacent values of float32 rows in place, each group
        separately, from value `begin` on."""
        self._norm(buffer, buffer, Dtype.FLOAT, norm, groups=groups, begin=begin)

    def _norm(self, source: int, output: int, dtype: Dtype, norm: NormArgs, **fields: int | float) -> None:
        self.add(
            OpKind.NORM,
            dtype,
            source,
            output,
            columns=norm.size,
            weight=norm.weight,
            second=norm.bias,
            eps=norm.eps,
            centered=int(norm.centered),
            own_weights=int(norm.own_weights),
            **fields,
        )

    def linear(
        self,
        source: int,
        output: int,
        dtype: Dtype,
        rows: int,
        columns: int,
        weight: int,
        *,
        results: Results = STORED,
        bias: int = 0,
        zero_point: int = 0,
        minima: bool = False,
        low_rank: LowRank | None = None,
        book: int = 0,
        group: int = 0,
    ) -> None:
        """Add an operation: source [T, columns] times W [rows, columns] transposed.

        The gate epilogue halves the rows. Integer weights need a source written by `norm` or `quantize` for their zero
        point; without planes, of bfloat16.

        Args:
            results: what the sums of products and biases become.
            low_rank: additions to the product, before bias and gate; `shrink` with the same ones must precede.
            book, group: of codes: the address of their numbers, and the inputs that share a scale.
        """
        function = results.function
        if function is Function.PLAIN and results.scale != 1.0:
            function = Function.IDENTITY
        self.add(
            OpKind.LINEAR,
            dtype,
            source,
            output,
            rows=rows,
            columns=columns,
            weight=weight,
            epilogue=results.epilogue,
            second=bias,
            zero_point=zero_point,
            minima=int(minima),
            output_dtype=results.dtype,
            function=function,
            scale=results.scale,
            limit=results.limit,
            curve=results.curve,
            low_rank=0 if low_rank is None else ctypes.addressof(low_rank),
            book=book,
            scaled=group,
        )
        if dtype in CODES:
            self.ops[-1].planes = int(self.wide is Dtype.FLOAT)

    def shrink(
        self, source: int, dtype: Dtype, columns: int, low_rank: LowRank, *, norm: NormArgs | None = None
    ) -> None:
        """Add an operation: A x of each row's low-rank addition, for the next `linear` with the same `low_rank`.

        Args:
            dtype: of the rows of `source` [T, columns], FLOAT or BFLOAT.
            norm: of the rows, which must be float32; None for none.
        """
        own = norm or NormArgs(columns, 0.0, 0)
        self.kept.append(low_rank)
        self.add(
            OpKind.SHRINK,
            dtype,
            source,
            0,
            columns=columns,
            weight=own.weight,
            second=own.bias,
            eps=own.eps,
            centered=int(own.centered),
            low_rank=ctypes.addressof(low_rank),
        )

    def run_beside(self) -> None:
        """Let the operation added last run beside the next one, which must not read its output."""
        self.ops[-1].beside = 1

    def rope(
        self,
        source: int,
        output: int,
        dtype: Dtype,
        heads: tuple[int, int, int],
        rotary_dim: int,
        cos_sin: int,
        cache: int,
        *,
        block_stride: int,
        cache_dtype: Dtype | None = None,
        group: int = 0,
        norms: tuple[int, int] = (0, 0),
        eps: float = 0.0,
        temperature: tuple[float, int, int] | None = None,
        rotates_first: bool = False,
    ) -> None:
        """Add an operation on heads q, k, v, concatenated as float32: rotate q into `output`, and write rotated k and v
        into the cache, as `dtype` or as INT8.

        Args:
            heads: (query heads, key-value heads, head dimension).
            block_stride: bytes from one block of the cache to the next.
            group: the cache group whose slots give the cells of keys and values.
            norms: the weights of the heads' own norms.
            temperature: scale, interval and first position of the queries' factors, 1 + scale * ln(1 + floor((first +
                position) / interval)); None for none.
            rotates_first: the norms are of rotated heads.
        """
        scale, interval, first = temperature or (0.0, 1, 0)
        self.add(
            OpKind.ROPE,
            dtype,
            source,
            output,
            **_heads(heads),
            rotary_dim=rotary_dim,
            weight=cos_sin,
            second=norms[0],
            third=norms[1],
            eps=eps,
            cache=cache,
            block_stride=block_stride,
            cache_dtype=dtype if cache_dtype is None else cache_dtype,
            group=group,
            scale=scale,
            window=interval,
            begin=first,
            rotates_first=rotates_first,
        )

    def attend(
        self,
        source: int,
        output: int,
        dtype: Dtype,
        heads: tuple[int, int, int],
        cache: int,
        scale: float,
        *,
        block_stride: int,
        cache_dtype: Dtype | None = None,
        group: int = 0,
        window: int = 0,
        chunked: bool = False,
        soft_cap: float = 0.0,
        slopes: int = 0,
        sinks: int = 0,
    ) -> None:
        """Causal attention of the queries in `source` over each row's context, through the group's block tables.

        Args:
            block_stride: as for `rope`.
            chunked: windows begin at multiples of their size.
            slopes, sinks: addresses of the heads' linear biases and of their sinks, float32; 0 for none.
        """
        for kind in (OpKind.ATTEND, OpKind.MERGE):
            self.add(
                kind,
                dtype,
                source,
                output,
                **_heads(heads),
                scale=scale,
                window=window,
                chunked=chunked,
                soft_cap=soft_cap,
                second=slopes,
                third=sinks,
                cache=cache,
                block_stride=block_stride,
                cache_dtype=dtype if cache_dtype is None else cache_dtype,
                group=group,
            )

    def quantize(
        self, source: int, output: int, dtype: Dtype, columns: int, *, zero_point: int = 0, order: int = 0
    ) -> None:
        """Add an operation: convert rows of `dtype` to integers with a scale per 32 values, for weights with this zero
        point; without planes, to bfloat16.

        Args:
            order: address of int32 [columns]: value i of a result is value order[i] of the row; 0 for the same order.
        """
        self.add(OpKind.QUANTIZE, dtype, source, output, columns=columns, zero_point=zero_point, third=order)

    def narrow(self, source: int, output: int, columns: int) -> None:
        """Add an operation: convert float32 rows to bfloat16."""
        self.add(OpKind.QUANTIZE, Dtype.FLOAT, source, output, columns=columns)
        self.ops[-1].planes = 0

    def copy(
        self,
        source: int,
        output: int,
        columns: int,
        *,
        begin: int = 0,
        places: int = 0,
        first: int = 0,
        scale: float = 1.0,
        epilogue: Epilogue = Epilogue.STORE,
    ) -> None:
        """Add an operation: copy values of float32 rows, times `scale`, into rows that may be longer, whose other
        values it leaves.

        Args:
            begin: place of the first value.
            first: the first value that is copied.
            epilogue: the values are stored, added to those of the output, or with GATE multiplied with them.
            places: address of int32 [columns], the place of each value; 0 if they are adjacent.
        """
        fields: dict[str, int | float] = {"groups": first, "scale": scale, "epilogue": epilogue}
        self.add(OpKind.COPY, Dtype.FLOAT, source, output, columns=columns, begin=begin, third=places, **fields)

    def all_reduce(
        self, source: int, output: int, columns: int, exchange: Exchange, *, add: float | None = None
    ) -> None:
        """Add operations: the sums over ranks of float32 rows, whose `columns` are a multiple of 16.

        Args:
            add: a factor, to add its product with the sums to the output; None to store them. The output may be the
                source.
        """
        self._share(source, columns, exchange)
        epilogue, scale = (Epilogue.STORE, 1.0) if add is None else (Epilogue.ADD, add)
        places: dict[str, int | float] = {"columns": columns, "epilogue": epilogue, "scale": scale}
        self.add(OpKind.ALL_REDUCE, Dtype.FLOAT, source, output, details=exchange.handle, **places)

    def all_gather(self, source: int, output: int, columns: int, exchange: Exchange) -> None:
        """Add operations: the ranks' float32 rows of `columns` values, side by side."""
        self._share(source, columns, exchange)
        self.add(OpKind.ALL_GATHER, Dtype.FLOAT, source, output, columns=columns, details=exchange.handle)

    def _share(self, source: int, columns: int, exchange: Exchange) -> None:
        self.exchange = exchange
        self.add(OpKind.SHARE, Dtype.FLOAT, source, 0, columns=columns, details=exchange.handle)

    def add(self, kind: OpKind, dtype: Dtype, source: int, output: int, **fields: int | float) -> None:
        """Add an operation of any kind; the fields are those of `Op`."""
        self.ops.append(Op(kind=kind, dtype=dtype, input=source, output=output, planes=self.planes, **fields))


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _heads(shape: tuple[int, int, int]) -> dict[str, int]:
    return dict(zip(("heads", "kv_heads", "head_dim"), shape, strict=True))
