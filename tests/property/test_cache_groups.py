"""Groups of layers that keep different things of a sequence, over one pool of blocks."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.cache.cache import KVCache
from octavo.cache.table import BlockTable
from octavo.core.cache_groups import FULL, NO_BLOCK, CacheGroup, GroupKind

BLOCK = 4
WINDOW = CacheGroup(GroupKind.WINDOW, window=6)
STATE = CacheGroup(GroupKind.STATE, snapshot_tokens=8)


def compute(cache: KVCache, table: BlockTable, keys: list[int], start: int, end: int, step: int) -> None:
    growth = cache.grow(table, start, end)
    assert growth is not None
    cache.register(table, "", keys, end)
    cache.launched(step)


def computed(cache: KVCache, keys: list[int], *ends: int) -> BlockTable:
    """A table whose sequence was computed in steps up to each of `ends`, all of which have run."""
    table = BlockTable()
    start = cache.match(table, "", keys)
    for step, end in enumerate(ends):
        compute(cache, table, keys, start, end, step)
        cache.finished(step)
        start = end
    return table


@given(st.lists(st.integers(1, 9), min_size=1, max_size=20), st.integers(1, 20), st.integers(0, 2))
@settings(max_examples=300, deadline=None)
def test_a_window_holds_no_more_than_it_says(counts, window, in_flight):
    group = CacheGroup(GroupKind.WINDOW, window=window)
    cache = KVCache(200, BLOCK, (group,), step_tokens=max(counts) * max(in_flight, 1))
    table, end = BlockTable(), 0
    total = sum(counts)
    for step, count in enumerate(counts):
        compute(cache, table, list(range(total)), end, end + count, step)
        if step >= in_flight:
            cache.finished(step - in_flight)
        end += count
        assert cache.pool.num_used <= cache.blocks_for(total)
        held = table.groups[0]
        assert all(held[p // BLOCK] != NO_BLOCK for p in range(group.first_read(end), end))


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 2), st.integers(1, 9)), max_size=40))
@settings(max_examples=200, deadline=None)
def test_groups_of_full_attention_share_and_copy_alike(moves):
    """Sequences that have a block in common in one of them have one in the other, wherever they got it from."""
    cache = KVCache(48, BLOCK, (CacheGroup(), WINDOW, CacheGroup()), step_tokens=9)
    tables, known = [BlockTable() for _ in range(5)], [[] for _ in range(5)]
    for step, (which, other, count) in enumerate(moves):
        table, source = tables[which], tables[other]
        if len(known[which]) > 30:
            cache.release(table)
            known[which] = []
        elif not known[which] and known[other] and count % 3 == 0:
            if cache.fork(source, table, len(known[other])):
                known[which] = known[other][:-1]
        else:
            own, begun = 100 * (which == 4), len(known[which])  # most sequences have the same tokens
            keys = [*known[which], *range(own + begun, own + begun + count)]
            start = begun if table.groups else cache.match(table, "", keys)
            if cache.grow(table, start, len(keys)) is None:
                cache.release(table)
                keys = []
            cache.register(table, "", keys, len(keys))
            known[which] = keys
        cache.launched(step)
        cache.finished(step)
        pairs = [pair for each in tables if each.groups for pair in zip(each.groups[0], each.groups[2], strict=True)]
        assert len(set(pairs)) == len({one for one, _ in pairs}) == len({two for _, two in pairs})


def test_a_block_that_left_a_window_is_held_until_the_step_has_run():
    cache = KVCache(20, BLOCK, (WINDOW,), step_tokens=8)
    table = BlockTable()
    compute(cache, table, list(range(20)), 0, 8, step=0)
    compute(cache, table, list(range(20)), 8, 16, step=1)
    compute(cache, table, list(range(20)), 16, 20, step=2)
    assert table.groups[0][:2] == [NO_BLOCK, NO_BLOCK]
    assert cache.pool.num_used == 5
    cache.finished(0)
    cache.finished(1)
    assert cache.pool.num_used == 5
    cache.finished(2)
    assert cache.pool.num_used == 3


def test_a_recount_keeps_what_steps_in_flight_may_read():
    cache = KVCache(20, BLOCK, (WINDOW,), step_tokens=8)
    table = BlockTable()
    compute(cache, table, list(range(20)), 0, 16, step=0)
    compute(cache, table, list(range(20)), 16, 20, step=1)
    used = cache.pool.num_used
    cache.recount([table])
    assert cache.pool.num_used == used
    cache.finished(1)
    cache.release(table)
    cache.check_empty(0)


def test_a_prefix_is_found_where_the_window_has_its_last_blocks():
    cache = KVCache(40, BLOCK, (*FULL, WINDOW), step_tokens=16)
    keys = list(range(16))
    cache.release(computed(cache, keys, 8, 16))
    longer = BlockTable()
    assert cache.match(longer, "", [*keys, 99]) == 16
    full, window = longer.groups
    assert NO_BLOCK not in full
    assert window[:2] == [NO_BLOCK, NO_BLOCK]
    assert NO_BLOCK not in window[2:]


def test_a_prefix_ends_where_the_window_has_lost_a_block():
    cache = KVCache(40, BLOCK, (*FULL, WINDOW), step_tokens=16)
    keys = list(range(16))
    table = computed(cache, keys, 16)
    last = table.groups[1][-1]
    cache.release(table)
    assert cache.tree.remove(last) == [last]
    cache.pool.forget(last)
    assert cache.match(BlockTable(), "", [*keys, 99]) == 12
    cache.check()


def test_a_full_block_that_goes_takes_what_is_behind_it_in_all_groups():
    cache = KVCache(40, BLOCK, (*FULL, WINDOW), step_tokens=16)
    table = computed(cache, list(range(16)), 16)
    first = table.groups[0][0]
    assert len(cache.tree) == 8
    assert len(cache.tree.remove(first)) == 8


def test_a_state_is_found_at_the_end_of_a_chunk_and_copied_before_it_changes():
    cache = KVCache(40, BLOCK, (*FULL, STATE), step_tokens=16)
    keys = list(range(20))
    assert cache.chunk(0, 20) == 16
    table = computed(cache, keys, 16)
    kept = table.groups[1][0]
    growth = cache.grow(table, 16, 20)
    assert growth.copies[-1][0] == kept
    assert table.groups[1][0] != kept
    other = BlockTable()
    assert cache.match(other, "", keys) == 16
    assert other.groups[1] == [kept]


def test_the_longest_sequence_that_fits():
    assert KVCache(10, BLOCK).longest(1000) == 40
    assert KVCache(10, BLOCK, (CacheGroup(), CacheGroup())).longest(1000) == 20
    windows = KVCache(10, BLOCK, (*FULL, WINDOW), step_tokens=1)  # a window holds 3 blocks at most
    assert windows.longest(1000) == 28
    assert windows.blocks_for(28) == 10
    assert KVCache(3, BLOCK, (WINDOW,), step_tokens=1).longest(1000) == 1000


def test_a_state_is_not_found_in_the_step_that_writes_it():
    """Its copy would come before it is written."""
    cache = KVCache(40, BLOCK, (STATE,), step_tokens=16)
    keys, table = list(range(20)), BlockTable()
    cache.grow(table, 0, 16)
    cache.register(table, "", keys, 16)
    assert cache.match(BlockTable(), "", keys) == 0
    cache.launched(0)
    assert cache.match(BlockTable(), "", keys) == 16


def test_a_state_whose_tokens_are_not_all_known_is_kept_for_nobody():
    cache = KVCache(40, BLOCK, (STATE,), step_tokens=16)
    table = BlockTable()
    cache.grow(table, 0, 9)
    cache.register(table, "", list(range(8)), 8, num_computed=9)
    cache.launched(0)
    assert cache.match(BlockTable(), "", list(range(9))) == 0


def test_a_sequence_with_a_state_is_not_forked():
    cache = KVCache(40, BLOCK, (*FULL, STATE), step_tokens=16)
    table = computed(cache, list(range(6)), 6)
    copy = BlockTable()
    assert not cache.fork(table, copy, 6)
    assert not copy.groups
