"""Which pages leave the host's memory: those that nothing continues, the ones first that were used least recently."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from octavo.features.host_cache.index import PageIndex


def page(*path: int) -> bytes:
    return bytes(path)


def test_the_end_of_a_sequence_goes_first() -> None:
    index = PageIndex()
    index.resize(3)
    assert index.add([page(1), page(1, 1), page(1, 1, 1)], [b"", page(1), page(1, 1)]) == []
    assert index.add([page(2)], [b""]) == [page(1, 1, 1)]
    assert index.add([page(2, 1)], [page(2)]) == [page(1, 1)]
    assert [page(1) in index, page(2) in index, page(2, 1) in index] == [True, True, True]
    assert len(index) == 3


def test_what_was_used_stays() -> None:
    index = PageIndex()
    index.resize(2)
    index.add([page(1), page(2)], [b"", b""])
    assert index.use(page(1))
    assert not index.use(page(3))
    assert index.add([page(3)], [b""]) == [page(2)]


def test_a_shared_beginning_outlasts_what_continued_it() -> None:
    """It was used each time, so it does not go right after the last sequence that goes."""
    index = PageIndex()
    index.resize(4)
    index.add([page(9), page(1), page(1, 1)], [b"", b"", page(1)])
    index.use(page(9))
    index.use(page(1))
    assert index.add([page(2), page(3)], [b"", b""]) == [page(1, 1)]
    assert index.add([page(4)], [b""]) == [page(9)]


def test_pages_whose_beginning_is_lost() -> None:
    index = PageIndex()
    index.resize(3)
    index.add([page(1), page(1, 1)], [b"", page(1)])
    index.discard([page(1), page(7)])
    assert index.add([page(1)], [b""]) == []
    assert index.resize(1) == [page(1, 1)]
    assert index.resize(0) == [page(1)]
    index.resize(3)
    assert index.add([page(2, 1), page(2)], [page(2), b""]) == []
    assert index.resize(0) == [page(2, 1), page(2)]


def test_a_beginning_that_comes_back_stays_with_what_continues_it() -> None:
    index = PageIndex()
    index.resize(3)
    index.add([page(1), page(1, 1)], [b"", page(1)])
    index.discard([page(1)])
    index.add([page(1)], [b""])
    index.use(page(1, 1))
    assert index.add([page(2), page(3)], [b"", b""]) == [page(1, 1)]


def test_what_was_lost_often_takes_no_memory() -> None:
    index = PageIndex()
    index.resize(10)
    for _ in range(1000):
        index.add([page(1), page(1, 1)], [b"", page(1)])
        index.discard([page(1, 1), page(1)])
    assert len(index._ends) < 100
    assert index.add([page(1)], [b""]) == []
    assert index.clear() == [page(1)]
    assert len(index) == 0


class Model:
    """The same, slowly. The order of pages is that of their last use."""

    def __init__(self) -> None:
        self.pages: list[bytes] = []

    def use(self, one: bytes) -> bool:
        if one not in self.pages:
            return False
        self.pages.remove(one)
        self.pages.append(one)
        return True

    def shrink(self, capacity: int) -> list[bytes]:
        gone = []
        while len(self.pages) > capacity:
            ends = [one for one in self.pages if not any(other[:-1] == one for other in self.pages)]
            gone.append(ends[0])
            self.pages.remove(ends[0])
        return gone


PATHS = st.lists(st.integers(1, 3), min_size=1, max_size=4)
ACTIONS = st.one_of(
    st.tuples(st.just("add"), PATHS), st.tuples(st.just("use"), PATHS), st.tuples(st.just("resize"), st.integers(1, 9))
)


@given(st.lists(ACTIONS, max_size=60))
def test_it_is_what_a_slow_model_says(actions: list[tuple[str, list[int] | int]]) -> None:
    index, model, capacity = PageIndex(), Model(), 5
    index.resize(capacity)
    for what, given_to in actions:
        if isinstance(given_to, int):
            capacity = given_to
            assert index.resize(capacity) == model.shrink(capacity)
            continue
        path = bytes(given_to)
        if what == "use":
            assert index.use(path) == model.use(path)
            continue
        whole = [path[: i + 1] for i in range(len(path))]
        before = [one[:-1] for one in whole]
        for one in whole:
            if not model.use(one):
                model.pages.append(one)
        assert index.add(whole, before) == model.shrink(capacity)
        assert len(index) == len(model.pages)
        assert all(one in index for one in model.pages)
