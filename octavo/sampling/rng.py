"""Counter-based random numbers: a hash of (seed, position), so that a draw depends on nothing else.

The hash is the output function of SplitMix64 (Steele, Lea and Flood 2014, "Fast splittable pseudorandom number
generators", https://doi.org/10.1145/2714064.2660195), applied to the seed and then to the position-th state of the
sequence that starts there.
"""

from __future__ import annotations

import torch
from torch import Tensor


def _signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value


_GAMMA = _signed(0x9E3779B97F4A7C15)
_MIX_1 = _signed(0xBF58476D1CE4E5B9)
_MIX_2 = _signed(0x94D049BB133111EB)


def uniform(seeds: Tensor, positions: Tensor) -> Tensor:
    """Return a number in [0, 1) for each (seed, position), with 53 random bits.

    Args:
        seeds: [n] int64.
        positions: [n] int64; number of output tokens so far.

    Returns:
        [n] float64.
    """
    key = _mix(seeds + _GAMMA)
    bits = _mix(key + (positions + 1) * _GAMMA)
    return _shift_right(bits, 11).to(torch.float64) * 2.0**-53


def _mix(z: Tensor) -> Tensor:
    """SplitMix64's output function. int64 products wrap around like the paper's unsigned ones."""
    z = (z ^ _shift_right(z, 30)) * _MIX_1
    z = (z ^ _shift_right(z, 27)) * _MIX_2
    return z ^ _shift_right(z, 31)


def _shift_right(z: Tensor, count: int) -> Tensor:
    """Logical shift of int64, whose built-in shift is arithmetic."""
    shifted: Tensor = (z >> count) & (2 ** (64 - count) - 1)
    return shifted
