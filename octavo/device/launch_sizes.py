"""Sizes of launches. Triton has functions of these names, which kernels may call, too; they take 3 µs, as long as some
launches do."""

from __future__ import annotations


def cdiv(count: int, size: int) -> int:
    """Return count / size, rounded up."""
    return -(-count // size)


def next_power_of_2(count: int) -> int:
    """Return the least power of two that is at least `count`."""
    return 1 << max(0, count - 1).bit_length()
