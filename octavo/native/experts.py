"""Operations of a mixture of experts in a native program: `src/experts.h` in ctypes, and their order."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_float, c_int32, c_void_p
from dataclasses import dataclass
from enum import IntEnum

from octavo.native.bindings import Dtype, Epilogue, LowRank, OpKind
from octavo.native.builder import ProgramBuilder


class Scores(IntEnum):
    """What experts are chosen by; see `RoutingSpec.scores`."""

    SOFTMAX = 0
    SIGMOID = 1
    CHOSEN = 2
    MIXER = 3


class ExpertsArgs(ctypes.Structure):
    """`OctavoExperts`."""

    _fields_ = (
        *((name, c_void_p) for name in ("expand", "reduce", "correction", "scales", "begin", "chunks")),
        *((name, c_int32) for name in ("count", "top_k", "scores", "groups", "top_groups", "group_best")),
        *((name, c_int32) for name in ("normalized", "on_inputs")),
        *((name, c_float) for name in ("floor", "scaling", "jitter")),
        *((name, c_int32) for name in ("chosen", "weights", "rows", "choices", "shared", "shared_gate")),
        *((name, c_int32) for name in ("first", "owned")),
    )


@dataclass(frozen=True, slots=True)
class ExpertProducts:
    """The products of a layer's experts in a native program.

    Attributes:
        expand, reduce: builders (`ProgramBuilder.inner`) with a product per expert of this rank: from the gathered rows
            to the inner values, and from these, rounded if `inner` is another buffer than `rounded`, to the outputs.
        gathered, inner, rounded, reduced: their buffers, with a row per choice.
        hidden, size: values of the rows of `gathered` and `reduced`, and of `rounded`.
        between: dtype of the inner values.
    """

    expand: ProgramBuilder
    reduce: ProgramBuilder
    gathered: int
    inner: int
    rounded: int
    reduced: int
    hidden: int
    size: int
    between: Dtype


@dataclass(frozen=True, slots=True)
class ExpertAdditions:
    """Low-rank additions to the products of this rank's experts.

    Attributes:
        expand, reduce: to each expert's products; `top_k`, `choices` and `shrunk` are set by `emit_experts`.
        ranks: most ranks of an addition to a product, over all of its parts.
        inner: inputs of the second products.
    """

    expand: Sequence[LowRank]
    reduce: Sequence[LowRank]
    ranks: int
    inner: int


def emit_experts(
    b: ProgramBuilder,
    args: ExpertsArgs,
    products: ExpertProducts,
    logits: int,
    source: int,
    output: int,
    *,
    add: float | None = None,
    additions: ExpertAdditions | None = None,
) -> None:
    """Add operations: choose experts by the router's logits, multiply their rows, and sum the outputs.

    Args:
        args: how experts are chosen, the first one of this rank, and what is added besides; the other fields are set
            here.
        logits: the buffer of float32 [T, args.count].
        source: the buffer of the experts' inputs, float32 [T, hidden].
        output: the buffer of the sums, float32 [T, hidden].
        add: a factor, to add its product with the sums to the output; None to store them.
        additions: to the experts' products; None for none.
    """
    args.owned = len(products.expand.ops)
    of_choice, count = args.top_k * ctypes.sizeof(c_int32), args.owned + 1
    for name in ("chosen", "weights", "rows", "choices"):
        setattr(args, name, b.scratch(f"experts: {name}", of_choice))
    begin, chunks = (c_int32 * count)(), (c_int32 * count)()
    args.begin, args.chunks = ctypes.addressof(begin), ctypes.addressof(chunks)
    if additions is not None:
        _set_additions(b, args, products, additions)
    args.expand, args.reduce = b.nest(products.expand), b.nest(products.reduce)
    b.kept.extend((args, begin, chunks))
    details, hidden, size = ctypes.addressof(args), products.hidden, products.size
    first, second = products.expand.ops[0], products.reduce.ops[0]
    b.add(OpKind.ROUTE, Dtype.FLOAT, logits, 0, columns=args.count, details=details)
    b.add(OpKind.PLACE, Dtype.FLOAT, 0, 0, columns=args.count, details=details)
    b.add(OpKind.GATHER, Dtype.FLOAT, source, products.gathered, columns=hidden, details=details)
    if additions is not None:
        b.run_beside()
        shrunk = additions.expand[0].shrunk
        b.add(OpKind.SHRINK_EXPAND, Dtype.FLOAT, source, shrunk, columns=_padded(hidden), details=details)
    b.add(OpKind.EXPAND, Dtype(first.dtype), 0, 0, rows=first.rows, columns=hidden, details=details)
    if products.rounded != products.inner:
        b.add(OpKind.ROUND, Dtype.FLOAT, products.inner, products.rounded, columns=size, details=details)
        if additions is not None:
            b.run_beside()
    if additions is not None:
        shrunk, columns = additions.reduce[0].shrunk, _padded(additions.inner)
        b.add(OpKind.SHRINK_REDUCE, products.between, products.inner, shrunk, columns=columns, details=details)
    b.add(OpKind.REDUCE, Dtype(second.dtype), 0, 0, rows=second.rows, columns=size, details=details)
    epilogue, scale = (Epilogue.STORE, 1.0) if add is None else (Epilogue.ADD, add)
    places: dict[str, int | float] = {"columns": hidden, "epilogue": epilogue, "scale": scale, "details": details}
    b.add(OpKind.COMBINE, Dtype.FLOAT, products.reduced, output, **places)


def _set_additions(b: ProgramBuilder, args: ExpertsArgs, products: ExpertProducts, additions: ExpertAdditions) -> None:
    """Have the experts' products add their additions, which need s = A x of each row (`src/low_rank.h`)."""
    shrunk = b.scratch("experts: shrunk", additions.ranks * ctypes.sizeof(c_float), args.top_k)
    for builder, tables in ((products.expand, additions.expand), (products.reduce, additions.reduce)):
        for op, table in zip(builder.ops, tables, strict=True):
            table.top_k, table.choices, table.shrunk = args.top_k, args.choices, shrunk
            op.low_rank = ctypes.addressof(table)
            b.kept.append(table)


def _padded(columns: int) -> int:
    """Return the columns in whole vectors; rows of A and x end with zeros."""
    return -(-columns // 16) * 16
