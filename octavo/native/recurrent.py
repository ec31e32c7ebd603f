"""Operations of recurrent layers in a native program (`src/recurrent.cpp`).

Each computes a row's tokens in order, and reads and writes the row's state in its block of the cache.
"""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int32, c_int64, c_void_p

from octavo.native.bindings import Dtype, OpKind
from octavo.native.builder import ProgramBuilder
from octavo.native.exchange import Exchange

MOST_TAPS = 8
"""Of a convolution: its own input and seven before it."""


class States(ctypes.Structure):
    """`States`: one tensor of a layer's states, float32.

    Attributes:
        first: address of the one in block 0.
        stride: floats between blocks.
    """

    _fields_ = (("first", c_void_p), ("stride", c_int64))


class Conv(ctypes.Structure):
    """`OctavoConv`: a causal convolution, y = sum over taps of weight * input + bias.

    Attributes:
        weight: address of float32 [taps, stride], `stride` at least the channels rounded up to 16.
        bias: address of float32 [stride]; 0 for none.
        states: [channels, taps - 1], the inputs before the step, oldest first.
        begin: of the inputs in the rows that it reads.
        before, after: of what multiplies the inputs, and the outputs, in these rows; -1 for nothing.
        activates: apply SiLU to the sums.
    """

    _fields_ = (
        *((name, c_void_p) for name in ("weight", "bias")),
        ("states", States),
        *((name, c_int32) for name in ("channels", "stride", "taps", "begin", "before", "after", "activates")),
    )


class GatedNorm(ctypes.Structure):
    """`OctavoGatedNorm`: RMSNorm over groups of values, and a SiLU gate before or after it.

    Attributes:
        weight: address of float32 [size], or [groups, size] with `own_weights`; 0 for ones.
        size, groups: values of a group, and adjacent groups that are normalized separately.
        begin, to: of the first group in the rows that it reads, and in those that it writes.
        gates, gate: the buffer of the gates, float32, and where in its rows they begin; -1 for none.
        gate_first: norm(x * silu(gate)) instead of norm(x) * silu(gate).
        squares, place: the buffer of sums of squares over ranks, float32, and the place of this rank's group in its
            rows; -1 if ranks divide no group.
        whole: values that a sum of squares is of.
    """

    _fields_ = (
        ("weight", c_void_p),
        ("eps", c_float),
        *((name, c_int32) for name in ("size", "groups", "own_weights", "begin", "to", "gates", "gate", "gate_first")),
        *((name, c_int32) for name in ("squares", "place", "whole")),
    )

    @classmethod
    def alone(cls, size: int, groups: int, eps: float) -> GatedNorm:
        """Return a norm of whole groups, without weights and gates, from the first value on."""
        return cls(size=size, groups=groups, eps=eps, gates=-1, squares=-1, whole=size)


class Ssd(ctypes.Structure):
    """`OctavoSsd`: the state space of Mamba-2; see `nn/recurrent/ssd.py`.

    Attributes:
        decay, skip, bias: addresses of float32 [heads], as in `Rates`.
        states: [heads, head_dim, state].
        low, high: limits of the step sizes.
        groups: each serves as many consecutive heads.
        sizes, raw: the buffer of the step sizes before bias and softplus, float32, and where in its rows they begin.
    """

    _fields_ = (
        *((name, c_void_p) for name in ("decay", "skip", "bias")),
        ("states", States),
        *((name, c_float) for name in ("low", "high")),
        *((name, c_int32) for name in ("heads", "head_dim", "state", "groups", "sizes", "raw")),
    )


class Delta(ctypes.Structure):
    """`OctavoDelta`: the gated delta rule; see `nn/recurrent/delta_rule.py`.

    Attributes:
        decay, bias: addresses of float32 [heads], as in `Gates`.
        states: [heads, key_dim, head_dim].
        gates: the buffer of float32 rows in which each head's rate begins at `rate`, and its decay's input at `raw`.
    """

    _fields_ = (
        *((name, c_void_p) for name in ("decay", "bias")),
        ("states", States),
        *((name, c_int32) for name in ("key_heads", "key_dim", "heads", "head_dim", "gates", "rate", "raw")),
    )


class Scan(ctypes.Structure):
    """`OctavoScan`: the state space of Mamba, and its gate; see `nn/recurrent/selective.py`.

    Attributes:
        decay, skip: addresses of float32 [channels, state] and [channels].
        states: [channels, state].
        sizes: the buffer of the step sizes before the softplus, float32 [T, channels].
        parts, into, read: the buffer of inputs to and outputs from states, float32, and where in its rows they begin.
        gates, gate: the buffer of the gates, float32, and where in its rows they begin.
    """

    _fields_ = (
        *((name, c_void_p) for name in ("decay", "skip")),
        ("states", States),
        *((name, c_int32) for name in ("channels", "state", "sizes", "parts", "into", "read", "gates", "gate")),
    )


def convolve(b: ProgramBuilder, conv: Conv, source: int, output: int, dtype: Dtype, group: int) -> None:
    """Add an operation: a causal convolution of float32 rows.

    Args:
        output: buffer for [T, channels] in `dtype`, FLOAT or BFLOAT.
        group: the cache group whose block tables give the states, also below.
    """
    _add(b, OpKind.CAUSAL_CONV, conv, source, output, dtype, group)


def norm_gated(b: ProgramBuilder, norm: GatedNorm, source: int, output: int, dtype: Dtype) -> None:
    """Add an operation: the gated norm of float32 rows, to rows of `dtype`, FLOAT or BFLOAT. The output may be the
    source, if both begin at the same value."""
    _add(b, OpKind.GATED_NORM, norm, source, output, dtype)


def sum_squares(b: ProgramBuilder, norm: GatedNorm, source: int, groups: int, exchange: Exchange) -> None:
    """Add operations before `norm_gated`: sums of squares over ranks that have a part of a group each.

    Args:
        groups: of all ranks.
    """
    columns = -(-groups // 16) * 16
    norm.squares = b.scratch("squares of ranks", columns * 4)
    b.kept.append(norm)
    b.add(OpKind.SUM_SQUARES, Dtype.FLOAT, source, norm.squares, columns=columns, details=ctypes.addressof(norm))
    b.all_reduce(norm.squares, norm.squares, columns, exchange)


def scan_heads(b: ProgramBuilder, space: Ssd, buffer: int, group: int) -> None:
    """Add an operation: the state space of Mamba-2 over float32 rows of the heads' channels, each group's inputs to
    states and each group's outputs from states; the results take the channels' places."""
    _add(b, OpKind.SSD, space, buffer, buffer, Dtype.FLOAT, group)


def apply_delta_rule(b: ProgramBuilder, rule: Delta, buffer: int, group: int) -> None:
    """Add an operation: the gated delta rule over float32 rows of queries, keys and values; the results take the
    values' places."""
    _add(b, OpKind.DELTA_RULE, rule, buffer, buffer, Dtype.FLOAT, group)


def gate_by_sigmoid(b: ProgramBuilder, gates: int, output: int, dtype: Dtype, columns: int, channels: int = 1) -> None:
    """Add an operation: multiply rows of `dtype` by the sigmoid of float32 rows.

    Args:
        columns: of the gates; a multiple of 16 if `channels` is 1.
        channels: that a gate multiplies; 1 or a multiple of 16.
    """
    b.add(OpKind.SIGMOID_GATE, dtype, gates, output, columns=columns, head_dim=channels)


def scan_channels(b: ProgramBuilder, space: Scan, source: int, output: int, dtype: Dtype, group: int) -> None:
    """Add an operation: the state space of Mamba over float32 rows of channels, times silu(gate), to rows of `dtype`,
    FLOAT or BFLOAT."""
    _add(b, OpKind.SELECTIVE_SCAN, space, source, output, dtype, group)


def _add(
    b: ProgramBuilder, kind: OpKind, details: ctypes.Structure, source: int, output: int, dtype: Dtype, group: int = 0
) -> None:
    b.kept.append(details)
    b.add(kind, dtype, source, output, group=group, details=ctypes.addressof(details))
