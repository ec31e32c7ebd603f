"""Lookup in numpy and in torch, against a search by hand."""

from __future__ import annotations

import random

import numpy as np
import torch

from octavo.features.speculation import device
from octavo.features.speculation.history import History
from octavo.features.speculation.lookup import last, longest, nearest, voted


def by_hand(text: list[int], known: list[int], most: int) -> tuple[list[int], int]:
    for size in range(min(most, len(known)), 0, -1):
        end = known[-size:]
        found = [i for i in range(len(text) - 1) if i + 1 >= size and text[i + 1 - size : i + 1] == end]
        if found:
            return found, size
    return [], 0


def cases() -> list[tuple[list[int], list[int], int]]:
    rng = random.Random(3)
    made = []
    for _ in range(300):
        text, known = ([rng.randrange(3) for _ in range(rng.randrange(1, 20))] for _ in range(2))
        made.append((text, text if rng.random() < 0.5 else known, rng.randrange(1, 6)))
    return made


def array(tokens: list[int]) -> np.ndarray:
    return np.array(tokens, dtype=np.int32)


def test_the_longest_match_is_found() -> None:
    for text, known, most in cases():
        found = longest(array(text), array(known), most)
        assert (found.ends.tolist(), found.size) == by_hand(text, known, most)


def test_a_device_finds_the_same() -> None:
    some = cases()
    width = 24
    texts, knowns = (torch.full((len(some), width), -1) for _ in range(2))
    for row, (text, known, _) in enumerate(some):
        texts[row, : len(text)], knowns[row, : len(known)] = torch.tensor(text), torch.tensor(known)
    sizes, lengths = (torch.tensor([len(one[i]) for one in some]) for i in (0, 1))
    for most in range(1, 6):
        place = torch.arange(len(some)) % 7
        ends, found = device.matched(texts, sizes, knowns, lengths, place, most)
        drafts, valid = device.following(texts, sizes, ends, 4, repeat=False)
        cyclic, all_valid = device.following(texts, sizes, ends, 4, repeat=True)
        for row, (text, known, _) in enumerate(some):
            matches = longest(array(text), array(known), most)
            assert found[row] == matches.size
            if matches.size:
                expected = nearest(matches, int(place[row]), 4).tolist()
                distance = np.abs(matches.ends - int(place[row]))
                if (distance == distance.min()).sum() == 1:
                    assert drafts[row, : valid[row]].tolist() == expected
                    assert all_valid[row] == 4
                    assert cyclic[row].tolist() == np.resize(array(text[ends[row] + 1 :]), 4).tolist()


def test_a_text_that_repeats_itself_goes_on_repeating() -> None:
    text = array([1, 2, 3, 1, 2, 3, 1])
    matches = longest(text, text, 8)
    assert matches.size == 4
    assert last(matches, 7).tolist() == [2, 3, 1, 2, 3, 1, 2]
    assert voted(matches, 7, 0.1).tolist() == [2, 3, 1, 2, 3, 1, 2]


def test_the_most_frequent_continuation_wins() -> None:
    text = array([7, 1, 5, 7, 1, 6, 7, 2, 9, 7])
    matches = longest(text, text, 1)
    assert voted(matches, 1, 0.5).tolist() == [1]
    assert voted(matches, 1, 0.7).tolist() == []  # 2 of 3
    assert voted(matches, 3, 0.1).tolist() == [1, 6, 7]  # of 5 and 6 the later


def test_nothing_matches_nothing() -> None:
    empty = longest(array([]), array([4]), 3)
    assert empty.size == len(last(empty, 3)) == len(nearest(empty, 0, 3)) == len(voted(empty, 3, 0.1)) == 0


def test_a_prediction_is_followed_at_its_place() -> None:
    """A line that occurs twice is continued as the place says."""
    prediction = array([1, 9, 2, 3, 1, 9, 4, 5])
    matches = longest(prediction, array([1, 9]), 8)
    assert nearest(matches, 1, 2).tolist() == [2, 3]
    assert nearest(matches, 5, 2).tolist() == [4, 5]


def test_a_history_forgets_the_oldest() -> None:
    history = History(2)
    for output in ([1, 2], [3, 4], [5, 6]):
        history.add(output)
    assert history.text.tolist() == [3, 4, -2, 5, 6, -2]
    history.add([7] * 100_000)
    assert len(history.text) == 65_537
