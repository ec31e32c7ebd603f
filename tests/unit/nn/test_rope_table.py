"""The rotary table. Whole models with every scaling are compared with Transformers in tests/golden."""

from __future__ import annotations

import math

import pytest
import torch

from octavo.nn.rope import Rope, cos_sin_table, inverse_frequencies
from octavo.nn.rope_spec import LinearScaling, Llama3Scaling, RopeSpec, YarnScaling

LLAMA3 = Llama3Scaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=8192)


def test_a_table_of_cosines_and_sines() -> None:
    table = cos_sin_table(RopeSpec(rotary_dim=8, max_position=50, theta=100.0))
    assert table.shape == (50, 8)
    assert table.dtype == torch.float32
    for position in (0, 1, 49):
        for pair in range(4):
            angle = position * 100.0 ** (-2 * pair / 8)
            assert table[position, pair].item() == pytest.approx(math.cos(angle), abs=1e-5)
            assert table[position, pair + 4].item() == pytest.approx(math.sin(angle), abs=1e-5)


def test_linear_scaling_divides_positions() -> None:
    plain = cos_sin_table(RopeSpec(8, 60))
    scaled = cos_sin_table(RopeSpec(8, 60, scaling=LinearScaling(3.0)))
    torch.testing.assert_close(scaled[0:60:3], plain[:20])


def test_llama3_keeps_short_waves_and_slows_long_ones() -> None:
    """The published Llama 3.1 settings: 128 channels, base 500,000."""
    plain = inverse_frequencies(RopeSpec(128, 1, 5e5))
    ratio = plain / inverse_frequencies(RopeSpec(128, 1, 5e5, LLAMA3))
    waves = 2 * math.pi / plain
    torch.testing.assert_close(ratio[waves < 2048], torch.ones_like(ratio[waves < 2048]))
    torch.testing.assert_close(ratio[waves > 8192], torch.full_like(ratio[waves > 8192], 8.0))
    between = ratio[(waves >= 2048) & (waves <= 8192)]
    assert len(between) > 2
    assert (between.diff() > 0).all()


def test_yarn_scales_the_whole_table() -> None:
    scaling = YarnScaling(factor=4.0, original_max_position=32, attention_factor=1.25)
    table = cos_sin_table(RopeSpec(16, 40, scaling=scaling))
    torch.testing.assert_close(table[:, :8] ** 2 + table[:, 8:] ** 2, torch.full((40, 8), 1.25**2))


def test_divisors_from_a_file_stand_in_for_llama3_and_are_not_applied_twice() -> None:
    spec = RopeSpec(128, 30, 5e5, LLAMA3)
    divisors = inverse_frequencies(RopeSpec(128, 30, 5e5)) / inverse_frequencies(spec)
    for stated in (spec, RopeSpec(128, 30, 5e5)):
        rope = Rope(torch.device("cpu"), stated)
        (want,) = rope.wanted()
        assert want.optional
        assert want.spec.shape == divisors.shape
        rope.place([divisors])
        torch.testing.assert_close(rope.cos_sin, cos_sin_table(spec))


def test_side_by_side_or_apart_is_the_same() -> None:
    rope = Rope(torch.device("cpu"), RopeSpec(16, 100))
    rope.place([None])
    qkv, positions = torch.randn(5, 7, 16), torch.tensor([0, 3, 99, 4, 4])
    q, k = rope(qkv[:, :4].clone(), qkv[:, 4:6].clone(), positions)
    untouched = qkv[:, 6:].clone()
    rope.joint(qkv[:, :6], positions)
    assert torch.equal(qkv, torch.cat([q, k, untouched], dim=1))
