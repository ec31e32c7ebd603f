"""The block pool, the prefix tree and their facade, driven at random against brute-force models."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from octavo.cache.cache import KVCache
from octavo.cache.prefix_tree import PrefixTree
from octavo.cache.table import BlockTable

BLOCK = 4
tokens = st.lists(st.integers(0, 2), min_size=1, max_size=24)


class CacheMachine(RuleBasedStateMachine):
    """Sequences that start, grow, fork and end. `content` is the brute-force truth: what each block really holds."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = KVCache(num_blocks=12, block_size=BLOCK)
        self.content: list[list[tuple[int, ...] | None]] = [[None] * BLOCK for _ in range(12)]
        self.live: list[tuple[BlockTable, list[int]]] = []

    def write(self, table: BlockTable, keys: list[int], start: int, end: int) -> bool:
        growth = self.cache.grow(table, start, end)
        if growth is None:
            return False
        for source, destination in growth.copies:
            self.content[destination] = list(self.content[source])
        for p in range(start, end):
            self.content[table.blocks[p // BLOCK]][p % BLOCK] = tuple(keys[: p + 1])
        self.cache.register(table, "", keys, end)
        return True

    @rule(keys=tokens)
    def start(self, keys: list[int]) -> None:
        table = BlockTable()
        hit = self.cache.match(table, "", keys)
        assert hit < len(keys)
        assert hit % BLOCK == 0
        if self.write(table, keys, hit, len(keys)):
            self.live.append((table, list(keys)))
        else:
            self.cache.release(table)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), key=st.integers(0, 2))
    def extend(self, data: st.DataObject, key: int) -> None:
        table, keys = data.draw(st.sampled_from(self.live))
        if self.write(table, [*keys, key], len(keys), len(keys) + 1):
            keys.append(key)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), key=st.integers(0, 2))
    def fork(self, data: st.DataObject, key: int) -> None:
        source, keys = data.draw(st.sampled_from(self.live))
        table = BlockTable()
        self.cache.fork(source, table, len(keys))
        if self.write(table, keys, len(keys) - 1, len(keys)):
            self.live.append((table, list(keys)))
        else:
            self.cache.release(table)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        entry = data.draw(st.sampled_from(self.live))
        self.live.remove(entry)
        self.cache.release(entry[0])

    @rule()
    def reset(self) -> None:
        self.cache.reset()

    @invariant()
    def every_sequence_still_reads_its_own_tokens(self) -> None:
        for table, keys in self.live:
            for p in range(len(keys)):
                assert self.content[table.blocks[p // BLOCK]][p % BLOCK] == tuple(keys[: p + 1])

    @invariant()
    def books_balance(self) -> None:
        self.cache.check()
        references: dict[int, int] = {}
        for table, _ in self.live:
            for block in table.blocks:
                references[block] = references.get(block, 0) + 1
        for block in range(self.cache.num_blocks):
            assert self.cache.pool.refs(block) == references.get(block, 0)
        assert self.cache.pool.num_used == len(references)

    def teardown(self) -> None:
        for table, _ in self.live:
            self.cache.release(table)
        assert self.cache.num_free == self.cache.num_blocks


TestCache = CacheMachine.TestCase
TestCache.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


@given(st.lists(st.tuples(st.sampled_from(["", "a"]), tokens), max_size=20), st.data())
@settings(max_examples=200, deadline=None)
def test_tree_agrees_with_a_dictionary_of_prefixes(sequences, data):
    tree, truth, block = PrefixTree(BLOCK), {}, 0
    for namespace, keys in sequences:
        node = tree.root(namespace)
        for i in range(len(keys) // BLOCK):
            prefix = (namespace, *keys[: (i + 1) * BLOCK])
            node = tree.insert(node, keys[i * BLOCK : (i + 1) * BLOCK], [block])
            truth.setdefault(prefix, block)
            assert node.blocks == [truth[prefix]]
            block += 1
        if truth and data.draw(st.booleans()):
            victim = data.draw(st.sampled_from(sorted(truth)))
            gone = tree.remove(truth[victim])
            below = {p for p in truth if p[: len(victim)] == victim}
            assert sorted(gone) == sorted(truth[p] for p in below)
            for p in below:
                del truth[p]
    assert len(tree) == len(truth)
    for namespace, keys in sequences:
        expected = []
        for i in range(len(keys) // BLOCK):
            found = truth.get((namespace, *keys[: (i + 1) * BLOCK]))
            if found is None:
                break
            expected.append(found)
        assert [n.blocks for n in tree.match(namespace, keys, 99)] == [[block] for block in expected]


def test_full_blocks_go_least_recently_used_first_and_tails_before_heads():
    cache = KVCache(num_blocks=4, block_size=BLOCK)
    old, new = BlockTable(), BlockTable()
    for table, keys in ((old, [1] * 8), (new, [2] * 8)):
        cache.grow(table, 0, 8)
        cache.register(table, "", keys, 8)
    head, tail = old.blocks
    cache.release(old)
    cache.release(new)
    third = BlockTable()
    cache.grow(third, 0, 4)
    assert third.blocks == [tail]
    assert head in cache.tree
    assert cache.match(BlockTable(), "", [1] * 9) == 4
    assert cache.match(BlockTable(), "", [2] * 9) == 8


def test_namespaces_do_not_share():
    cache = KVCache(num_blocks=4, block_size=BLOCK)
    table = BlockTable()
    cache.grow(table, 0, 4)
    cache.register(table, "tenant a", [1, 2, 3, 4], 4)
    assert cache.match(BlockTable(), "tenant b", [1, 2, 3, 4, 5]) == 0
    assert cache.match(BlockTable(), "tenant a", [1, 2, 3, 4, 5]) == 4


def test_an_empty_namespace_leaves_nothing_behind():
    cache = KVCache(num_blocks=2, block_size=BLOCK)
    for i in range(10):
        table = BlockTable()
        cache.grow(table, 0, 8)
        cache.register(table, f"salt {i}", [1] * 8, 8)
        cache.release(table)
    assert len(cache.tree._roots) == 1


def test_a_fork_goes_on_from_what_is_registered_of_the_shared_part():
    cache = KVCache(num_blocks=8, block_size=BLOCK)
    source, fork = BlockTable(), BlockTable()
    cache.grow(source, 0, 8)
    cache.register(source, "", [1] * 8, 8)
    cache.fork(source, fork, 6)
    assert (fork.num_registered, fork.node) == (1, source.node.parent)
    cache.grow(fork, 6, 12)  # the second block, of which it has a half, becomes its own
    cache.register(fork, "", [1] * 6 + [2] * 6, 12)
    assert fork.blocks[0] == source.blocks[0]
    assert fork.blocks[1] != source.blocks[1]
    assert cache.match(BlockTable(), "", [1] * 6 + [2] * 7) == 12
    assert cache.match(BlockTable(), "", [1] * 9) == 8
