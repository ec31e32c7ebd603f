"""Where an adapter's rows are, and the tables by which kernels find them."""

from __future__ import annotations

import itertools
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from octavo.core.errors import ConfigError
from octavo.device.transfer import link_of
from octavo.features.lora.layout import (
    Geometry,
    Manifest,
    Piece,
    Span,
    Target,
    TargetPart,
    joined,
    largest,
    layout,
)
from octavo.features.lora.tables import NONE, TILE_ROWS, Assigned, Tables, grouped, most_tiles

HOST = link_of(torch.device("cpu"))


def target(path: str, *parts: tuple[str, int, int], **kinds: bool) -> Target:
    return Target(path, tuple(TargetPart(name, i, o, i, o) for name, i, o in parts), **kinds)


TARGETS = (
    target("layers.0.self_attn", ("q_proj", 48, 64), ("k_proj", 48, 32), ("v_proj", 48, 32)),
    target("layers.0.mlp", ("down_proj", 80, 48)),
    target("embed_tokens", ("", 131, 48), embedding=True),
    target("lm_head", ("", 48, 131), head=True),
)

pieces = st.lists(
    st.sampled_from([(t, p) for t, one in enumerate(TARGETS) for p in range(len(one.parts))]), unique=True
).flatmap(
    lambda places: st.tuples(
        *(
            st.builds(
                lambda place, rank, kind: (
                    Piece(*place, rank=rank, gain=kind == 1) if kind < 2 else Piece(*place, whole=True)
                ),
                st.just(place),
                st.integers(1, 40),
                st.integers(0, 2),
            )
            for place in sorted(places)
        )
    )
)
geometries = st.builds(
    Geometry,
    slices=st.integers(1, 5),
    slice_bytes=st.sampled_from([16, 48, 256, 1280, 4096, 512 * 3]),
    element_size=st.sampled_from([2, 4]),
    by_output=st.booleans(),
)


def rows_of(piece: Piece, span: Span, geometry: Geometry) -> list[tuple[int, int]]:
    """The first tile and the tiles of each row."""
    one = TARGETS[piece.target]
    part = one.parts[piece.part]
    inputs, outputs = geometry.row_tiles(part.inputs), geometry.row_tiles(part.outputs)
    if piece.whole:
        count, size = (part.inputs, outputs) if one.embedding else (part.outputs, inputs)
        return [(span.whole + i * size, size) for i in range(count)]
    found = [(span.a + i * inputs, inputs) for i in range(span.rank)]
    if geometry.by_output:
        found.append((span.b, geometry.row_tiles(part.outputs * geometry.stride(span.rank))))
    else:
        found += [(span.b + i * outputs, outputs) for i in range(span.rank)]
    if piece.gain:
        found.append((span.gain, -(-part.outputs * 4 // geometry.tile_bytes)))
    return found


@given(pieces, geometries)
def test_rows_fill_the_range_without_gaps_and_without_overlap(found: tuple[Piece, ...], geometry: Geometry) -> None:
    placed = layout(TARGETS, Manifest(found), geometry)
    rows = [row for piece in found for row in rows_of(piece, placed.spans[piece.target, piece.part], geometry)]
    assert [first for first, _ in rows] == [0, *(first + size for first, size in rows)][: len(rows)]
    assert all(first + size == after for (first, size), (after, _) in pairwise(rows))
    assert placed.num_tiles == sum(size for _, size in rows)
    tile = geometry.tile_bytes
    assert geometry.slice_bytes % tile == 0
    assert (placed.num_blocks - 1) * geometry.block_bytes < placed.num_tiles * tile or not rows
    assert placed.num_blocks * geometry.block_bytes >= placed.num_tiles * tile


@given(st.integers(1, 64), geometries)
def test_the_largest_adapter_takes_no_more_than_stated(rank: int, geometry: Geometry) -> None:
    every = [(t, p) for t, one in enumerate(TARGETS) for p in range(len(one.parts))]
    for whole in (False, True):
        manifest = Manifest(
            tuple(
                Piece(*place, whole=True) if whole and place[0] >= 2 else Piece(*place, rank, gain=True)
                for place in every
            )
        )
        assert layout(TARGETS, manifest, geometry).num_blocks <= largest(TARGETS, rank, geometry)


def test_slices_that_have_no_tiles_are_refused() -> None:
    with pytest.raises(ConfigError, match="multiples of 16 bytes; a block has 3 parts of 24"):
        Geometry(3, 24, 2)


def test_a_sum_has_the_ranks_of_its_adapters() -> None:
    first = Manifest((Piece(0, 0, 4, 2.0), Piece(1, 0, 8)))
    second = Manifest((Piece(0, 0, 3), Piece(0, 2, 5)))
    assert joined([first, second]).pieces == (Piece(0, 0, 7), Piece(0, 2, 5), Piece(1, 0, 8))


def test_what_comes_after_attention_leaves_keys_alone() -> None:
    late = (*TARGETS, target("layers.1.mlp", ("down_proj", 80, 48), late=True))
    assert not Manifest((Piece(3, 0, 4), Piece(4, 0, 4))).changes_keys(late)
    assert Manifest((Piece(3, 0, 4), Piece(1, 0, 4))).changes_keys(TARGETS)


adapters = st.lists(st.integers(-1, 5), max_size=90).map(lambda found: np.array(found, dtype=np.int32))


@given(adapters)
def test_tiles_cover_the_rows_of_each_adapter_once(chosen: np.ndarray) -> None:
    tiles, groups = grouped(chosen)
    found: dict[int, list[int]] = {}
    for index, *rows in tiles.tolist():
        assert len(rows) == TILE_ROWS
        count = TILE_ROWS - rows.count(NONE)
        assert count > 0
        assert rows[count:] == [NONE] * (TILE_ROWS - count)
        found.setdefault(index, []).extend(rows[:count])
    expected = {index: np.flatnonzero(chosen == index).tolist() for index in sorted({*chosen.tolist()} - {NONE})}
    assert found == expected
    assert {index: rows.tolist() for index, rows in groups.items()} == expected
    assert len(tiles) <= most_tiles(len(chosen), 6)


@given(st.lists(adapters, min_size=1, max_size=4))
def test_nothing_is_left_of_a_larger_step(steps: list[np.ndarray]) -> None:
    assigned, rank_groups = Assigned(90, 6, HOST, most_groups=3), np.array([1, 3, 2, 0, 1, 2])
    for chosen in steps:
        assigned.fill(chosen, rank_groups)
    tiles, _ = grouped(steps[-1])
    assert assigned.adapter.tolist() == steps[-1].tolist() + [NONE] * (90 - len(steps[-1]))
    assert assigned.tiles[: len(tiles)].tolist() == tiles.tolist()
    entries = [[tile, index, group] for tile, index in enumerate(tiles[:, 0]) for group in range(rank_groups[index])]
    assert assigned.work[0] == len(entries)
    assert assigned.work[1 : 1 + 3 * len(entries)].view(-1, 3).tolist() == entries
    ends = [0, *itertools.accumulate(5 * max(1, int(rank_groups[index])) for index in tiles[:, 0])]
    assert assigned.ends.tolist() == ends[1:] + ends[-1:] * (len(assigned.ends) - len(tiles))
    own = steps[-1].tolist() + [NONE] * (len(assigned.rest) * TILE_ROWS - len(steps[-1]))
    without = [2 * (NONE in own[first : first + TILE_ROWS]) for first in range(0, len(own), TILE_ROWS)]
    assert assigned.rest.tolist() == list(itertools.accumulate(without))


def test_an_index_taken_by_another_adapter_has_nothing_of_the_first() -> None:
    geometry = Geometry(2, 256, 4)
    tables = Tables(TARGETS, geometry, 3, 200, HOST)
    assert (tables.meta[..., 2] == 0).all()
    first = layout(TARGETS, Manifest((Piece(0, 0, 4), Piece(1, 0, 2, gain=True))), geometry)
    tables.enter(1, range(first.num_blocks), first)
    span = first.spans[1, 0]
    assert tables.meta[1, 1, 0].tolist() == [span.a, span.b, 2, span.gain]
    second = layout(TARGETS, Manifest((Piece(0, 2, 8),)), geometry)
    tables.enter(1, [9, 4, 7], second)
    assert tables.meta[:, 1, :, 2].tolist() == [[0, 0, 8], [0, 0, 0], [0, 0, 0], [0, 0, 0]]
    assert tables.blocks[1, :3].tolist() == [9, 4, 7]
