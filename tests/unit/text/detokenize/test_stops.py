from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.text.detokenize.stops import StopMatcher

LETTERS = st.text(alphabet="abc", max_size=30)
STOPS = st.lists(st.text(alphabet="abc", min_size=1, max_size=5), max_size=4)


def run(stops: list[str], pieces: list[str], *, include: bool = False) -> tuple[str, str | None]:
    matcher = StopMatcher(stops, include=include)
    out = ""
    for piece in pieces:
        text, stop = matcher.push(piece)
        out += text
        if stop is not None:
            return out, stop
    return out + matcher.flush(), None


def expected(stops: list[str], text: str, *, include: bool) -> tuple[str, str | None]:
    """Grow the text by one character at a time and look whether it ends in a stop string."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            longest = max(ending, key=len)
            return text[: end if include else end - len(longest)], longest
    return text, None


@given(stops=STOPS, text=LETTERS, cuts=st.lists(st.integers(0, 30), max_size=8), include=st.booleans())
def test_equals_the_plain_definition_however_the_text_is_cut(
    stops: list[str], text: str, cuts: list[int], include: bool
) -> None:
    places = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[start:end] for start, end in itertools.pairwise(places)]
    assert run(stops, pieces, include=include) == expected(stops, text, include=include)


@given(stops=STOPS, text=LETTERS)
def test_no_more_is_held_back_than_could_begin_a_stop_string(stops: list[str], text: str) -> None:
    matcher, given_out = StopMatcher(stops), ""
    for place, char in enumerate(text, 1):
        piece, stop = matcher.push(char)
        given_out += piece
        if stop is not None:
            return
        held = text[len(given_out) : place]
        longest = max(
            (n for n in range(place + 1) if any(s.startswith(text[place - n : place]) for s in stops if len(s) > n)),
            default=0,
        )
        assert len(held) == longest


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_over_several_pieces(include: bool) -> None:
    matcher = StopMatcher(["END"], include=include)
    assert matcher.push("text E") == ("text ", None)
    assert matcher.push("N") == ("", None)
    assert matcher.push("D and more") == ("END" if include else "", "END")


def test_a_false_beginning_is_given_out() -> None:
    matcher = StopMatcher(["END"])
    assert matcher.push("EN") == ("", None)
    assert matcher.push("EMY") == ("ENEMY", None)
    assert matcher.push("E") == ("", None)
    assert matcher.flush() == "E"


def test_without_stop_strings_nothing_is_held() -> None:
    assert StopMatcher([]).push("anything") == ("anything", None)
