"""The kernels' C interface: `src/program.h` in ctypes."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Collection
from ctypes import POINTER, c_double, c_float, c_int, c_int32, c_int64, c_void_p
from enum import IntEnum

from octavo.native.build import NativeBuildError, load_library, load_separate

EXTERNALS = 3


class OpKind(IntEnum):
    EMBED = 0
    NORM = 1
    LINEAR = 2
    ROPE = 3
    ATTEND = 4
    MERGE = 5
    QUANTIZE = 6
    SHRINK = 7
    SHARE = 8
    ALL_REDUCE = 9
    ALL_GATHER = 10
    COPY = 11
    ROUTE = 12
    PLACE = 13
    GATHER = 14
    EXPAND = 15
    ROUND = 16
    REDUCE = 17
    COMBINE = 18
    SHRINK_EXPAND = 19
    SHRINK_REDUCE = 20
    LATENT_STORE = 21
    ABSORB = 22
    LATENT_ATTEND = 23
    LATENT_MERGE = 24
    LATENT_EXPAND = 25
    CAUSAL_CONV = 26
    GATED_NORM = 27
    SSD = 28
    DELTA_RULE = 29
    SIGMOID_GATE = 30
    SELECTIVE_SCAN = 31
    SUM_SQUARES = 32


class Dtype(IntEnum):
    """Storage format of an operation's weights or activations.

    INT4 and what follows are for weights only; activations are INT8 with INT4, else FLOAT or BFLOAT (`src/codes.h`).
    BF16 and F16 are for weights of 16 bits that meet activations in FLOAT; BFLOAT meets its own kind.
    """

    FLOAT = 0
    BFLOAT = 1
    INT8 = 2
    INT4 = 3
    CODE4 = 4
    CODE6 = 5
    E4M3 = 6
    E5M2 = 7
    BF16 = 8
    F16 = 9


CODES = (Dtype.CODE4, Dtype.CODE6, Dtype.E4M3, Dtype.E5M2, Dtype.BF16, Dtype.F16)
"""Formats of numbers that are widened to float32."""


class Epilogue(IntEnum):
    """How results are written: stored, added to the output, or as activation(gate) * up of paired panels."""

    STORE = 0
    ADD = 1
    GATE = 2


class Function(IntEnum):
    """What a product's results become, once multiplied with a factor: as they are (with GATE, silu of the first half),
    an activation of `nn/ops/activation.py`, limit * tanh(x / limit), or x within [-limit, limit]. CLAMPED_GATE is for
    GATE only, and computes `nn/experts_spec.py`'s gate of both halves, with the factor as alpha."""

    PLAIN = 0
    IDENTITY = 1
    SILU = 2
    GELU = 3
    GELU_TANH = 4
    RELU = 5
    RELU2 = 6
    CAP = 7
    CLIP = 8
    CLAMPED_GATE = 9
    XIELU = 10


class Op(ctypes.Structure):
    """`OctavoOp`."""

    _fields_ = (
        *((name, c_int32) for name in ("kind", "dtype", "input", "output", "rows", "columns", "epilogue", "packed")),
        *((name, c_int32) for name in ("heads", "kv_heads", "head_dim", "rotary_dim", "window")),
        *(
            (name, c_int32)
            for name in ("zero_point", "minima", "output_dtype", "planes", "function", "centered", "groups", "begin")
        ),
        *(
            (name, c_int32)
            for name in (
                "own_weights",
                "by_position",
                "cache_dtype",
                "group",
                "beside",
                "chunked",
                "scaled",
                "rotates_first",
            )
        ),
        *((name, c_float) for name in ("eps", "scale", "soft_cap", "limit")),
        *(
            (name, c_void_p)
            for name in ("weight", "second", "third", "cache", "book", "kernel", "low_rank", "code", "details", "curve")
        ),
        ("block_stride", c_int64),
    )


class StepArgs(ctypes.Structure):
    """`OctavoStep`."""

    _fields_ = (
        *((name, c_void_p) for name in ("input_ids", "positions", "slots", "query_start", "seq_lens", "block_tables")),
        ("unseen", c_void_p),
        ("ahead", c_void_p),
        ("rotations", c_void_p),
        ("external", c_void_p * EXTERNALS),
        *((name, c_int64) for name in ("table_stride", "group_tables", "group_slots")),
        *((name, c_int32) for name in ("tokens", "rows", "block_size", "of_logits")),
    )


class LowRank(ctypes.Structure):
    """`OctavoLowRank`."""

    _fields_ = (
        *((name, c_void_p) for name in ("memory", "blocks", "places", "outputs", "of_tokens", "of_logits")),
        ("slice_stride", c_int64),
        *((name, c_int32) for name in ("slice_bytes", "slices", "tile_bytes", "block_stride", "parts", "dtype")),
        *((name, c_int32) for name in ("top_k", "choices", "shrunk")),
    )


class Decode(ctypes.Structure):
    """`OctavoDecode`."""

    _fields_ = (
        *(
            (name, c_void_p)
            for name in (
                *("tokens", "length", "computed", "num_drafts", "block_tables", "sampling", "slots", "drafts"),
                "allowed",
            )
        ),
        ("external", c_void_p * EXTERNALS),
        *((name, c_void_p) for name in ("chosen", "peaks", "kept")),
        *((name, c_int64) for name in ("token_stride", "table_stride", "group_stride", "logit_stride")),
        *((name, c_int32) for name in ("count", "results", "block_size", "operations", "columns", "groups")),
        *((name, c_int32) for name in ("rewinds", "times")),
    )


class SampleArgs(ctypes.Structure):
    """`OctavoSample`."""

    _fields_ = (
        *(
            (name, c_void_p)
            for name in ("logits", "slots", "ahead", "allowed", "sampling", "tokens", "length", "chosen", "peaks")
        ),
        *((name, c_int64) for name in ("logit_stride", "token_stride")),
        *((name, c_int32) for name in ("count", "columns")),
    )


_ENTRIES = {
    "attention_int8": "octavo_attend_int8",
    "blocks": "octavo_multiply_blocks",
    "codes": "octavo_multiply_codes",
    "words": "octavo_multiply_words",
}
"""Separate library -> its function that operations of the main library point to."""

_APART = {
    OpKind.ROUTE: "experts",
    OpKind.PLACE: "experts",
    OpKind.GATHER: "experts",
    OpKind.EXPAND: "experts",
    OpKind.ROUND: "experts",
    OpKind.REDUCE: "experts",
    OpKind.COMBINE: "experts",
    OpKind.SHRINK_EXPAND: "experts",
    OpKind.SHRINK_REDUCE: "experts",
    OpKind.LATENT_STORE: "latent",
    OpKind.ABSORB: "latent",
    OpKind.LATENT_ATTEND: "latent",
    OpKind.LATENT_MERGE: "latent",
    OpKind.LATENT_EXPAND: "latent",
    OpKind.CAUSAL_CONV: "recurrent",
    OpKind.GATED_NORM: "recurrent",
    OpKind.SSD: "recurrent",
    OpKind.DELTA_RULE: "recurrent",
    OpKind.SIGMOID_GATE: "recurrent",
    OpKind.SELECTIVE_SCAN: "recurrent",
    OpKind.SUM_SQUARES: "recurrent",
}
"""Operation that the main library lacks -> the separate library that has it. Its function octavo_<library>_code returns
the operation's `OpCode`."""


def code_of(op: Op, isa: str = "auto") -> int | None:
    """Return the address of an operation's `OpCode`, for `Op.code`; None if the main library has the operation.

    Raises:
        NativeBuildError: its library can't be compiled or loaded on this machine.
    """
    source = _APART.get(OpKind(op.kind))
    return None if source is None else _code(source, op.kind, isa)


@functools.cache
def _code(source: str, kind: int, isa: str) -> int:
    function = getattr(load_separate(source, isa), f"octavo_{source}_code")
    function.argtypes, function.restype = [c_int], c_void_p
    found: int = function(kind)
    return found


def kernel_of(op: Op, isa: str = "auto") -> int | None:
    """Return the address of an operation's kernel, for `Op.kernel`; None if it is in the main library.

    Raises:
        NativeBuildError: it can't be compiled or loaded on this machine.
    """
    if op.kind == OpKind.LINEAR:
        source = "words"
        if op.planes and op.dtype not in (Dtype.FLOAT, Dtype.BFLOAT):
            source = "codes" if op.dtype in CODES else "blocks"
    elif op.kind == OpKind.ATTEND and op.cache_dtype == Dtype.INT8:
        source = "attention_int8"
    else:
        return None
    return _entry(source, isa)


@functools.cache
def _entry(source: str, isa: str) -> int | None:
    return ctypes.cast(getattr(load_separate(source, isa), _ENTRIES[source]), c_void_p).value


def open_library(isa: str = "auto", separate: Collection[str] = ()) -> ctypes.CDLL:
    """Return the library with its functions declared. The arguments are those of `load_library`.

    Raises:
        NativeBuildError: it can't be compiled or loaded on this machine.
    """
    library = load_library(isa, separate)
    library.octavo_pool_create.argtypes, library.octavo_pool_create.restype = [c_int], c_void_p
    library.octavo_pool_destroy.argtypes, library.octavo_pool_destroy.restype = [c_void_p], None
    library.octavo_program_create.argtypes = [
        *(c_void_p, POINTER(Op), c_int, POINTER(c_int64), POINTER(c_int32)),
        c_int,
    ]
    library.octavo_program_create.restype = c_void_p
    library.octavo_program_destroy.argtypes, library.octavo_program_destroy.restype = [c_void_p], None
    library.octavo_program_run.argtypes = [c_void_p, c_int, c_int, POINTER(StepArgs)]
    library.octavo_program_run.restype = c_int
    library.octavo_program_time.argtypes, library.octavo_program_time.restype = [c_void_p, c_void_p], None
    library.octavo_exchange_create.argtypes = [c_int, c_int, c_int, c_double]
    library.octavo_exchange_create.restype = c_void_p
    library.octavo_exchange_destroy.argtypes, library.octavo_exchange_destroy.restype = [c_void_p], None
    library.octavo_exchange_missing.argtypes, library.octavo_exchange_missing.restype = [c_void_p], c_int
    library.octavo_exchange_all_reduce.argtypes = [c_void_p, c_void_p, c_int64, c_int]
    library.octavo_exchange_all_reduce.restype = c_int
    library.octavo_exchange_all_gather.argtypes = [c_void_p, c_void_p, c_void_p, c_int64]
    library.octavo_exchange_all_gather.restype = c_int
    library.octavo_decode.argtypes, library.octavo_decode.restype = [c_void_p, POINTER(Decode)], c_int
    library.octavo_sample.argtypes, library.octavo_sample.restype = [c_void_p, POINTER(SampleArgs)], None
    sizes = ctypes.sizeof(Op) * 1_000_000 + ctypes.sizeof(StepArgs) * 1000 + ctypes.sizeof(Decode)
    if library.octavo_abi() != sizes:
        raise NativeBuildError(f"the library's structures ({library.octavo_abi()}) are not those of Python ({sizes})")
    return library
