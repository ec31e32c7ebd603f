"""Shapes of drafts that branch, against plain loops over paths."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.core.draft_tree import LARGEST, DraftTree
from octavo.core.plan import StepPlan

Path = tuple[int, ...]


@st.composite
def trees(draw: st.DrawFn) -> list[Path]:
    """Paths of a tree whose first branches are the deepest, in any order."""
    depth = draw(st.integers(1, 5))
    paths = [(0,) * n for n in range(1, depth + 1)]
    for _ in range(draw(st.integers(0, 12))):
        above = draw(st.sampled_from([(), *(path for path in paths if len(path) < depth)]))
        paths.append((*above, sum(path[:-1] == above for path in paths)))
    return draw(st.permutations(paths))


@given(trees())
def test_a_tree_is_that_of_its_paths(paths: list[Path]) -> None:
    tree = DraftTree.of(paths)
    assert len(tree) == len(paths)
    assert tree.chain == max(map(len, paths))
    way: dict[int, Path] = {-1: ()}
    for i, parent in enumerate(tree.parents):
        assert parent < i
        way[i] = (*way[parent], sum(other == parent for other in tree.parents[:i]))
    assert sorted(way.values()) == sorted([(), *paths])
    assert [way[i] for i in range(tree.chain)] == [(0,) * n for n in range(1, tree.chain + 1)]
    for i in range(len(tree)):
        assert tree.depths[i] == len(way[i])
        assert tree.behind[i] == i + 1 - len(way[i])
        for j in range(i + 1):
            precedes = way[i][: len(way[j])] == way[j]
            assert tree.precedes[i, j] == precedes
            assert tree.unseen[i] >> (i - j) & 1 == (not precedes)
        assert tree.unseen[i] >> (i + 1) == 0, "what precedes the drafts is seen"
    assert tree.ahead(len(tree)) == [0, *(len(way[i]) for i in range(len(tree)))]


def test_values_of_drafts_are_those_of_a_plans_tokens() -> None:
    tree = DraftTree.of([(0,), (1,), (0, 0), (0, 1)])
    plan = StepPlan(0, [], [0, 1, 2], [3, 6, 3], [0, 4, 2], [False, True, True], [], [])
    assert tree.branches(plan)
    assert tree.spread(tree.behind, plan).tolist() == [0, 0, 0, 0, 0, 0, 0, 2, 2, 0, 0, 0]
    assert not tree.branches(StepPlan(0, [], [0], [3], [2], [True], [], []))


@pytest.mark.parametrize(
    ("paths", "reason"),
    [
        ([], "each path must be there once"),
        ([(0,), (0,)], "each path must be there once"),
        ([(0,), (1, 0)], "needs the path"),
        ([(0,), (2,)], "needs the path"),
        ([(0,), (1,), (1, 0)], "must lead to the deepest one"),
        ([(i,) for i in range(LARGEST + 1)], "at most 30 paths"),
    ],
)
def test_what_is_no_tree(paths: list[Path], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        DraftTree.of(paths)
