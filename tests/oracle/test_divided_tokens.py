"""Attention of ranks that divide a step's tokens: each rank's rows are those of the whole step, and so is its cache."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import pytest
import ragged
import torch
from test_latent_attention import HALF, SMALL, moved
from test_latent_attention import make_case as latent_case
from torch import Tensor

pytest.importorskip("triton")

from octavo.nn.attention.cpu import TorchAttention
from octavo.nn.attention.layer import PagedAttention
from octavo.nn.attention.triton import TritonAttention
from octavo.nn.latent.cpu import TorchLatents
from octavo.nn.latent.layer import PagedLatents
from octavo.nn.latent.triton import TritonLatents
from octavo.nn.step import StepInput
from octavo.parallel.mesh import Mesh
from octavo.worker.context_parallel import TokenShare

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
RANKS = 2
ROWS = [(20, 12), (17, 1), (9, 9)]
"""Length and queries of each. Pieces are so short that latent attention takes the absorbed form on a GPU."""
PROMPTS = [(40, 40), (20, 12), (17, 1)]
BLOCK = 16


class Known:
    """`Collectives` of one rank; the test states what all ranks send."""

    def __init__(self, rank: int, parts: Sequence[Tensor]) -> None:
        most = max(map(len, parts))
        self._own = parts[rank]
        self._parts = [torch.cat([part, part.new_zeros(most - len(part), *part.shape[1:])]) for part in parts]

    def all_reduce(self, x: Tensor) -> Tensor:
        raise AssertionError("attention sums nothing")

    def all_gather(self, x: Tensor) -> Tensor:
        assert x.shape == self._parts[0].shape
        assert x.dtype == self._parts[0].dtype
        assert torch.equal(x[: len(self._own)], self._own)
        return torch.stack(self._parts)


def shares_of(step: StepInput, given: Tensor, backend: Any) -> list[tuple[Tensor, StepInput]]:
    """Return each rank's tokens and step.

    Args:
        given: what the ranks exchange, of all tokens.
    """
    parts = [given.index_select(0, TokenShare.of(step, Mesh(rank, RANKS)).tokens) for rank in range(RANKS)]
    found = []
    for rank in range(RANKS):
        share = TokenShare.of(step, Mesh(rank, RANKS, Known(rank, parts)))
        own = share.step(step)
        assert own.exchange is not None
        for one in (own, own.exchange.everyone):
            one.attn = backend.prepare(one, BLOCK)
        found.append((share.tokens, own))
    return found


def close(found: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    torch.testing.assert_close(found.float(), expected.float(), atol=ragged.TOLERANCE[dtype], rtol=1e-3)


@pytest.mark.parametrize("kind", [None, pytest.param(torch.float8_e5m2, marks=pytest.mark.slow)], ids=str)
def test_projections_that_the_backend_rotates(kind: torch.dtype | None) -> None:
    case = ragged.make_case(int.from_bytes(os.urandom(4)), HALF, heads=(2, 2), head_dim=32, block_size=BLOCK, rows=ROWS)
    spec, backend = case.spec, TritonAttention(case.dtype, case.spec)
    filled = ragged.filled_cache(case, backend, DEVICE)
    step, _, q = ragged.prepared(case, backend, case.q(len(case.label)), filled.clone(), DEVICE)
    qkv = torch.randn(len(q), 4 + 2 * 2, spec.head_dim, generator=torch.Generator().manual_seed(3)).to(DEVICE, HALF)
    angles = torch.arange(64.0)[:, None] * torch.arange(spec.head_dim // 2)
    turned = torch.cat([angles.cos(), angles.sin()], dim=1).to(DEVICE)
    ones = torch.ones(spec.head_dim, dtype=HALF, device=DEVICE)
    norms = ones, ones / 2, 1e-5
    layer = PagedAttention(spec, backend)
    layer.scales = None if kind is None else torch.full((2, 2), 0.01, device=DEVICE)
    layer.cache = whole = filled.to(kind or HALF, copy=True)
    shares = shares_of(step, qkv[:, 4:], backend)
    expected = layer.rotated(qkv.clone(), norms, turned, step)
    for tokens, own in shares:
        layer.cache = filled.to(kind or HALF, copy=True)
        found = layer.rotated(qkv.index_select(0, tokens), norms, turned, own)
        if kind is None:  # else others' keys come from the cache, where they are rounded
            close(found, expected.index_select(0, tokens), HALF)
        assert torch.equal(layer.cache.view(torch.uint8), whole.view(torch.uint8))


@pytest.mark.parametrize("window", [None, 9])
def test_keys_and_values(window: int | None) -> None:
    case = ragged.make_case(int.from_bytes(os.urandom(4)), torch.float32, block_size=BLOCK, rows=ROWS, window=window)
    backend = TorchAttention()
    filled = ragged.filled_cache(case, backend)
    step, whole, q = ragged.prepared(case, backend, case.q(len(case.label)), filled.clone())
    kv = torch.randn(len(q), 2 * case.spec.num_kv_heads, case.spec.head_dim)
    layer = PagedAttention(case.spec, backend)
    layer.cache = whole
    expected = layer(q, *kv.chunk(2, dim=1), step)
    for tokens, own in shares_of(step, kv, backend):
        layer.cache = filled.clone()
        close(layer(q[tokens], *kv[tokens].chunk(2, dim=1), own), expected[tokens], torch.float32)
        assert torch.equal(layer.cache.view(torch.uint8), whole.view(torch.uint8))


@pytest.mark.parametrize("rows", [ROWS, PROMPTS], ids=["short pieces", "prompts"])
@pytest.mark.parametrize("kind", [TorchLatents, TritonLatents])
def test_latents(kind: Any, rows: list[tuple[int, int]]) -> None:
    triton = kind is TritonLatents
    case = latent_case(rows, SMALL, HALF if triton else torch.float32)
    backend, device = (kind(HALF, SMALL), DEVICE) if triton else (kind(), torch.device("cpu"))
    step = moved(case.step, device)
    step.attn = backend.prepare(step, BLOCK)
    q, latents = (part.to(device, copy=True) for part in case.inputs(step.num_tokens, 5))
    norm = case.norm[0].to(device), case.norm[1]
    cos_sin, expansion = case.cos_sin.to(device), case.expansion.to(device)
    layer = PagedLatents(SMALL, backend)
    filled = torch.randn(backend.cache_shape(SMALL, case.num_blocks, BLOCK)).to(device, case.dtype)
    layer.cache = whole = filled.clone()
    expected = layer(q.clone(), latents.clone(), norm, cos_sin, expansion, step)
    stored = whole.flatten(0, 1)[step.slot_mapping]
    for tokens, own in shares_of(step, stored, backend):
        layer.cache = filled.clone()
        found = layer(q[tokens], latents[tokens], norm, cos_sin, expansion, own)
        close(found, expected[tokens], case.dtype)
        assert torch.equal(layer.cache, whole)
