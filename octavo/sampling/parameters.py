"""The table of sampling parameters, from which each sampler's layout is generated.

A row of `PARAMETERS` adds a parameter: to the structure that the native kernels read (`STRUCT`, `OctavoSampling` in
native/src/sample.h, whose fields have the same order), and, if it is for devices, to the words that a GPU's kernels
read (`OFFSETS`). No torch here: the processes that compile Triton kernels import this.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from octavo.sampling.state import PreparedParams


class ParameterKind(Enum):
    """Storage of a parameter: numpy's type in the structure, and the `struct` format in 32-bit words."""

    REAL = (np.float64, "f")
    SEED = (np.uint64, "Q")
    ADDRESS = (np.int64, "")
    COUNT = (np.int32, "i")


class Parameter(NamedTuple):
    """One parameter.

    Attributes:
        value: function of a request's prepared parameters and the length of its prompt.
        device: whether GPU kernels read it from the slots.
    """

    name: str
    kind: ParameterKind
    value: Callable[[PreparedParams, int], Any]
    device: bool = False


PARAMETERS = (
    Parameter("temperature", ParameterKind.REAL, lambda p, _: 0.0 if p.greedy else float(p.filters[0]), device=True),
    Parameter("top_p", ParameterKind.REAL, lambda p, _: float(p.filters[2]), device=True),
    Parameter("min_p", ParameterKind.REAL, lambda p, _: float(p.filters[3]), device=True),
    Parameter("repetition", ParameterKind.REAL, lambda p, _: p.repetition, device=True),
    Parameter("frequency", ParameterKind.REAL, lambda p, _: p.frequency, device=True),
    Parameter("presence", ParameterKind.REAL, lambda p, _: p.presence, device=True),
    Parameter("seed", ParameterKind.SEED, lambda p, _: int(p.seed) % 2**64, device=True),
    Parameter("banned_ids", ParameterKind.ADDRESS, lambda p, _: p.banned_ids.data_ptr()),
    Parameter("bias_ids", ParameterKind.ADDRESS, lambda p, _: p.bias_ids.data_ptr()),
    Parameter("bias_values", ParameterKind.ADDRESS, lambda p, _: p.bias_values.data_ptr()),
    Parameter("allowed", ParameterKind.ADDRESS, lambda p, _: 0 if p.allowed is None else p.allowed.ctypes.data),
    Parameter("bad_words", ParameterKind.ADDRESS, lambda p, _: p.packed_words.ctypes.data),
    Parameter("top_k", ParameterKind.COUNT, lambda p, _: int(p.filters[1]), device=True),
    Parameter("num_prompt", ParameterKind.COUNT, lambda _, num_prompt: num_prompt, device=True),
    Parameter("min_tokens", ParameterKind.COUNT, lambda p, _: p.min_tokens),
    Parameter("num_banned", ParameterKind.COUNT, lambda p, _: len(p.banned_ids)),
    Parameter("num_bias", ParameterKind.COUNT, lambda p, _: len(p.bias_ids)),
    Parameter("bad_words_size", ParameterKind.COUNT, lambda p, _: len(p.packed_words)),
    Parameter("changes", ParameterKind.COUNT, lambda p, _: int(p.changes)),
)

STRUCT = np.dtype([(one.name, one.kind.value[0]) for one in PARAMETERS], align=True)
"""`OctavoSampling`: the parameters of one slot. Addresses point into memory held by `PreparedParams`."""

_ON_DEVICE = [one for one in PARAMETERS if one.device]
_WORDS = struct.Struct("=" + "".join(one.kind.value[1] for one in _ON_DEVICE))
NUM_PARAMS = 1 << (_WORDS.size // 4 - 1).bit_length()
"""32-bit words of a slot on a device: a power of two, as Triton's ranges require."""

OFFSETS = {
    one.name: struct.calcsize("=" + "".join(before.kind.value[1] for before in _ON_DEVICE[:i])) // 4
    for i, one in enumerate(_ON_DEVICE)
}
"""Name -> index of its first word. Reals are float32; the seed has two words, the lower one first."""


def packed(params: PreparedParams, num_prompt: int) -> tuple[Any, ...]:
    """Return a row of `STRUCT`; it points into memory held by `params`."""
    return tuple(one.value(params, num_prompt) for one in PARAMETERS)


def packed_words(params: PreparedParams, num_prompt: int) -> np.ndarray:
    """Return [NUM_PARAMS] int32 in the layout of `OFFSETS`."""
    words = np.zeros(NUM_PARAMS, dtype=np.int32)
    values = _WORDS.pack(*(one.value(params, num_prompt) for one in _ON_DEVICE))
    words[: _WORDS.size // 4] = np.frombuffer(values, dtype=np.int32)
    return words
