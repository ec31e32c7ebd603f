"""Operations of recurrent layers in a native program (`src/recurrent.cpp`).

Each computes a row's tokens in order, and reads and writes the row's state in its block of the cache.
"""

from __future__ import annotations

import ctypes
from ctypes import c_int32, c_int64, c_void_p

from octavo.native.bindings import Dtype, OpKind
from octavo.native.builder import ProgramBuilder

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


def convolve(b: ProgramBuilder, conv: Conv, source: int, output: int, dtype: Dtype, group: int) -> None:
    """Add an operation: a causal convolution of float32 rows.

    Args:
        output: buffer for [T, channels] in `dtype`, FLOAT or BFLOAT.
        group: the cache group whose block tables give the states, also below.
    """
    _add(b, OpKind.CAUSAL_CONV, conv, source, output, dtype, group)


def _add(
    b: ProgramBuilder, kind: OpKind, details: ctypes.Structure, source: int, output: int, dtype: Dtype, group: int = 0
) -> None:
    b.kept.append(details)
    b.add(kind, dtype, source, output, group=group, details=ctypes.addressof(details))
