"""Draws are a function of (seed, position)."""

from __future__ import annotations

import os

import plain_sampler
import torch

from octavo.sampling.rng import uniform


def test_is_the_hash_it_says():
    seeds = [0, 1, -1, 2**63 - 1, -(2**63), int.from_bytes(os.urandom(8), "little", signed=True)]
    for position in (0, 1, 2, 1000, 2**40):
        got = uniform(torch.tensor(seeds), torch.full((len(seeds),), position))
        assert got.tolist() == [plain_sampler.splitmix_uniform(seed, position) for seed in seeds], seeds


def test_neighbouring_seeds_and_positions_are_unrelated():
    grid = torch.stack([uniform(torch.full((400,), seed), torch.arange(400)) for seed in range(400)])
    assert 0 <= float(grid.min()) < float(grid.max()) < 1
    assert abs(float(grid.mean()) - 0.5) < 0.005
    assert grid.unique().numel() == grid.numel()
    centred = grid - 0.5
    for a, b in ((centred[1:], centred[:-1]), (centred[:, 1:], centred[:, :-1])):
        assert abs(float((a * b).mean()) * 12) < 0.01
