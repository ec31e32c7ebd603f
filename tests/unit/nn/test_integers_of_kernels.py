"""Integers around another zero point than the middle of their range, as GGUF has of 5 bits, on a GPU."""

from __future__ import annotations

import pytest
import torch

from octavo.nn.quant.blocks import dequantized
from octavo.nn.quant.integers import as_integers
from octavo.nn.quant.words import pack_words, unpack_words
from octavo.nn.weights import QuantizedBlocks

CPU = torch.device("cpu")


def blocks(bits: int, zero_point: int, most: int, *, minima: bool = False) -> QuantizedBlocks:
    values = torch.randint(0, most + 1, (32, 128), dtype=torch.uint8)
    values[0, :2] = torch.tensor([0, most], dtype=torch.uint8)
    scales = torch.rand(32, 4).half() + 0.5
    return QuantizedBlocks(values, scales, torch.randn(32, 4).half() if minima else None, zero_point, bits)


@pytest.mark.parametrize("minima", [False, True])
@pytest.mark.parametrize(
    ("bits", "zero_point", "most", "stored"),
    [(8, 16, 31, 8), (8, 128, 255, 8), (4, 8, 15, 4), (4, 4, 7, 4), (4, 0, 7, 4), (4, 0, 15, 8), (8, 100, 227, 8)],
)
def test_zero_points_become_the_middle(bits: int, zero_point: int, most: int, stored: int, minima: bool) -> None:
    part = blocks(bits, zero_point, most, minima=minima)
    found = as_integers([part], CPU)
    assert found is not None
    assert (found[0].bits, found[0].zero_point) == (stored, 1 << (stored - 1))
    assert torch.equal(dequantized(found[0], torch.float32), dequantized(part, torch.float32))
    torch.testing.assert_close(unpack_words(pack_words(found, CPU)), dequantized(part, torch.float32))


def test_integers_beyond_8_bits_around_zero_are_left_to_others() -> None:
    assert as_integers([blocks(8, 100, 228)], CPU) is None


def test_fused_parts_of_different_zero_points_meet() -> None:
    parts = [blocks(8, 16, 31), blocks(8, 128, 255)]
    found = as_integers(parts, CPU)
    assert found is not None
    expected = torch.cat([dequantized(part, torch.float32) for part in parts])
    torch.testing.assert_close(unpack_words(pack_words(found, CPU)), expected)
