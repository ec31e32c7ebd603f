"""Layers whose keys and values have several shapes share the blocks of one KV cache."""

from __future__ import annotations

import math
from typing import Any, cast

import torch

from octavo.core.cache_groups import CacheGroup, GroupKind, groups_of
from octavo.device.cpu import CpuDevice
from octavo.nn.attention.base import AttentionSpec
from octavo.nn.attention.layer import PagedAttention
from octavo.nn.attention.reference import ReferenceAttention
from octavo.worker.attention import common_page, kinds_of, own_shapes
from octavo.worker.blocks import Blocks

BACKEND = ReferenceAttention()
WIDE, NARROW = AttentionSpec(4, 4, 32, 1.0, window=7), AttentionSpec(4, 1, 64, 1.0)


def layers(*specs: AttentionSpec) -> list[PagedAttention]:
    return [PagedAttention(spec, BACKEND) for spec in specs]


def test_layers_of_half_the_size_share_a_tensor() -> None:
    """Each has a part of every block, which no other layer of its group writes to."""
    own = layers(WIDE, NARROW, WIDE, NARROW, NARROW)
    page = common_page(own, BACKEND, 16)
    assert page == 2 * 16 * 4 * 32 == 2 * (2 * 16 * 64)
    groups = groups_of(kinds_of(own, BACKEND, 16, page))
    assert [(group.kind, group.layers, group.together, group.num_tensors) for group in groups] == [
        (GroupKind.WINDOW, (0, 2), 1, 2),
        (GroupKind.FULL, (1, 3, 4), 2, 2),
    ]
    blocks = Blocks(own, groups, (3, page), 16, torch.float32, CpuDevice(), own_shapes(own, BACKEND, 3, 16))
    assert blocks.caches.shape == (2, 3, page)
    for layer in own:
        assert layer.cache.shape == BACKEND.cache_shape(layer.spec, 3, 16)
        assert layer.group == (0 if layer.spec is WIDE else 1)
    blocks.caches.zero_()
    for number, layer in enumerate((own[1], own[3], own[4]), start=1):
        layer.cache += number
    assert blocks.caches.flatten(2).sum().item() == sum(range(1, 4)) * 3 * math.prod(own[1].cache.shape[1:])
    blocks.copy([(0, 2)])
    assert all(torch.equal(layer.cache[2], layer.cache[0]) for layer in own)


def test_layers_of_one_shape_are_as_before() -> None:
    own = layers(NARROW, NARROW)
    assert common_page(own, BACKEND, 16) == 0
    assert kinds_of(own, BACKEND, 16, 0) == [CacheGroup()] * 2


def test_shapes_of_equal_size_differ() -> None:
    own = layers(WIDE, AttentionSpec(4, 2, 64, 1.0))
    page = common_page(own, BACKEND, 16)
    assert [kind.together for kind in kinds_of(own, BACKEND, 16, page)] == [1, 1]


def test_layers_that_keep_something_else_have_no_shapes() -> None:
    assert own_shapes(cast(Any, [object()]), BACKEND, 1, 16) == []
