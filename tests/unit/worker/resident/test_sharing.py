"""Rows whose contexts begin alike find together: nothing is claimed that is not so, and no better way is missed."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("triton")

from octavo.core.params import SamplingParams
from octavo.core.plan import NewRow
from octavo.nn.step import SharedContexts
from octavo.worker.resident.sharing import BlockTables, Groups, grouped


@st.composite
def batches(draw):
    """Tables as a tree of prompts makes them: each row begins like one before it, and has blocks of its own then."""
    rows: list[list[int]] = []
    for row in range(draw(st.integers(1, 8))):
        own = [100 * (row + 1) + i for i in range(draw(st.integers(0, 6)))]
        donor = draw(st.sampled_from(rows)) if rows else []
        rows.append(donor[: draw(st.integers(0, len(donor)))] + own)
    width = max(len(row) for row in rows) + 1
    tables = np.array([row + [-1] * (width - len(row)) for row in rows], dtype=np.int32)
    whole = np.array([draw(st.integers(0, len(row))) for row in rows])
    return tables, whole


def check(found: Groups, tables: np.ndarray, whole: np.ndarray, most: int, unit: int) -> None:
    assert sorted(found.rows.tolist()) == list(range(len(tables)))
    at = saved = 0
    for begin, count, blocks in found.groups.tolist():
        rows = found.rows[begin : begin + count]
        assert begin == at
        assert 1 <= count <= most
        assert blocks % unit == 0
        assert all(whole[row] >= blocks for row in rows)
        assert (tables[rows, :blocks] == tables[rows[0], :blocks]).all()
        assert (found.lens[rows] == blocks).all()
        at, saved = at + count, saved + (count - 1) * blocks
    assert at == len(tables)
    assert found.saved == saved > 0


def best(tables: np.ndarray, whole: np.ndarray, most: int, unit: int) -> int:
    """By trying every way to cut the rows, in the order of their blocks."""
    rows = sorted(tuple(row[:count]) for row, count in zip(tables.tolist(), whole, strict=True))

    def common(begin: int, end: int) -> int:
        same = [len(set(column)) == 1 for column in zip(*rows[begin:end], strict=False)]
        return [*same, False].index(False) // unit * unit

    tops = [0]
    for end in range(1, len(rows) + 1):
        begins = range(max(0, end - most), end)
        tops.append(max(tops[begin] + (end - begin - 1) * common(begin, end) for begin in begins))
    return tops[-1]


@given(batches(), st.integers(2, 4), st.integers(1, 2))
def test_groups_are_true_and_the_best(batch, most, unit):
    tables, whole = batch
    found = grouped(tables, whole, most, unit)
    wanted = best(tables, whole, most, unit)
    if found is None:
        assert not wanted
    else:
        check(found, tables, whole, most, unit)
        assert found.saved == wanted


@given(batches(), st.integers(2, 4), st.integers(0, 9))
def test_padding_stands_in_groups_of_strangers(batch, most, padding):
    tables, whole = batch
    found = grouped(tables, whole, most, 1)
    if found is None:
        return
    size = len(tables) + padding
    shared = SharedContexts.of(torch.from_numpy(found.padded(size, most, 16)), size)
    groups, rows, lens = shared.groups.numpy(), shared.rows.numpy(), shared.lens.numpy()
    tables = np.concatenate([tables, np.full((padding, tables.shape[1]), -2, dtype=np.int32)])
    whole = np.concatenate([whole, np.zeros(padding, dtype=np.int64)])
    used = int(np.count_nonzero(groups[:, 1]))
    assert not groups[used:].any()
    check(Groups(groups[:used] // (1, 1, 16), rows, lens // 16, found.saved), tables, whole, most, 1)


def held(tables: BlockTables, slot: int, blocks: list[int]) -> None:
    tables.fill(NewRow(slot, [0], 1, SamplingParams(), 0, [], 0, [blocks]))


def test_tables_are_those_of_one_group():
    tables = BlockTables(4, 8, group=1)
    for slot in (0, 2):
        tables.fill(NewRow(slot, [0], 1, SamplingParams(), 0, [], 0, [[3 + slot, 4 + slot], [1, 2]]))
    whole, before = np.array([2, 2]), tables.version
    assert tables.groups([0, 2], whole, 4, 1).saved == 2
    tables.write([(0, 0, 0, 9), (0, 1, 2, 5), (2, 2, 1, 9)])
    assert tables.version == before
    assert tables.groups([0, 2], whole, 4, 1).saved == 2
    tables.write([(0, 1, 1, 7)])
    assert tables.version != before
    assert tables.groups([0, 2], whole, 4, 1).saved == 1


def test_tables_follow_what_requests_are_given():
    tables = BlockTables(4, 8)
    held(tables, 0, [1, 2, 3])
    held(tables, 2, [1, 2, 4])
    whole = np.array([3, 3])
    before = tables.version
    assert tables.groups([0, 2], whole, 4, 1).saved == 2
    assert tables.groups([0, 2], whole, 4, 3) is None
    tables.write([(0, 0, 3, 9), (2, 0, 3, 9)])
    assert tables.version == before
    tables.write([(0, 0, 1, 7)])
    assert tables.version != before
    assert tables.groups([2, 0], whole, 4, 1).saved == 1
    held(tables, 2, [5, 6])
    assert tables.groups([0, 2], np.array([4, 2]), 4, 1) is None
    tables.write([(2, 0, 2, 8)])
    tables.write([(2, 0, 0, 1)])
    assert tables.groups([0, 2], np.array([4, 3]), 4, 1).saved == 1
