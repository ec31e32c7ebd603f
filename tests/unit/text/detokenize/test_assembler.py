from __future__ import annotations

import itertools
from typing import Any

import pytest
import toy_tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.core.output import FinishReason, RequestOutput, RequestTimes, TokenDelta, TokenLogprobs
from octavo.core.params import OutputKind, SamplingParams
from octavo.core.request import GenerateRequest
from octavo.text.detokenize.assembler import RequestAssembler
from octavo.text.tokenizers.tokenizer import Tokenizer

TOKENIZER = Tokenizer(toy_tokenizers.byte_level())
PIECES = Tokenizer(toy_tokenizers.sentencepiece())
EOS = 2
STOP, LENGTH, ABORT, ERROR = FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT, FinishReason.ERROR
DELTA, CUMULATIVE, FINAL_ONLY = OutputKind.DELTA, OutputKind.CUMULATIVE, OutputKind.FINAL_ONLY


def assembler(
    tokenizer: Tokenizer = TOKENIZER, kind: OutputKind = DELTA, prompt: tuple[int, ...] = (5,), **params: Any
) -> RequestAssembler:
    sampling = SamplingParams(output_kind=kind, **params)
    request = GenerateRequest(id="r", tokens=list(prompt), params=sampling, arrival=1.0)
    return RequestAssembler(request, tokenizer, "the prompt")


def delta(tokens: list[int], finish: FinishReason | None = None, index: int = 0, **fields: Any) -> TokenDelta:
    return TokenDelta("r", index, tokens, finish=finish, **fields)


def encode(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


def play(target: RequestAssembler, deltas: list[TokenDelta]) -> list[RequestOutput]:
    return [output for item in deltas if (output := target.push(item)) is not None]


def test_delta_items_hold_what_is_new() -> None:
    a, b, c = encode("a"), encode("b"), encode("c")
    target = assembler(kind=DELTA)
    outputs = play(target, [delta(a), delta(b + c), delta([EOS], STOP)])
    assert [(o.outputs[0].text, o.outputs[0].token_ids, o.finished) for o in outputs] == [
        ("a", a, False),
        ("bc", b + c, False),
        ("", [EOS], True),
    ]
    assert outputs[-1].outputs[0].finish_reason == "stop"
    assert outputs[-1].outputs[0].stop_reason is None
    assert outputs[0].prompt == "the prompt"
    assert outputs[0].prompt_token_ids == [5]


def test_cumulative_items_hold_the_whole_and_stay_as_they_were() -> None:
    a, b = encode("a"), encode("b")
    outputs = play(assembler(kind=CUMULATIVE), [delta(a), delta(b, LENGTH)])
    assert [(o.outputs[0].text, o.outputs[0].token_ids) for o in outputs] == [("a", a), ("ab", a + b)]
    assert [o.outputs[0].finish_reason for o in outputs] == [None, "length"]


def test_final_only_is_one_item_with_all_choices_in_order() -> None:
    target = assembler(kind=FINAL_ONLY, n=2)
    deltas = [delta(encode("x"), index=1), delta(encode("y"), LENGTH, index=1), delta(encode("z"), LENGTH)]
    outputs = play(target, deltas)
    assert len(outputs) == 1
    assert [(choice.index, choice.text) for choice in outputs[0].outputs] == [(0, "z"), (1, "xy")]
    assert outputs[0].finished


@pytest.mark.parametrize("kind", [DELTA, CUMULATIVE])
def test_each_choice_ends_exactly_once(kind: OutputKind) -> None:
    target = assembler(kind=kind, n=2)
    deltas = [
        delta(encode("x"), LENGTH, index=1),
        delta(encode("y"), index=1),
        delta([], ABORT, index=1),
        delta(encode("z")),
        delta([EOS], STOP),
        delta([], ABORT),
    ]
    outputs = play(target, deltas)
    ended = [choice.index for output in outputs for choice in output.outputs if choice.finish_reason is not None]
    assert sorted(ended) == [0, 1]
    assert [output.finished for output in outputs] == [False, False, True]


@pytest.mark.parametrize("include", [False, True])
def test_the_text_of_the_token_that_ends(include: bool) -> None:
    x, y = encode("x")[0], encode("y")[0]
    target = assembler(include_stop_str_in_output=include, stop_token_ids=[y])
    output = play(target, [delta([x, y], STOP, stop_reason=y)])[0].outputs[0]
    assert output.text == ("xy" if include else "x")
    assert (output.token_ids, output.stop_reason, output.finish_reason) == ([x, y], y, "stop")


def test_end_of_sequence_is_not_shown_even_where_special_tokens_are() -> None:
    target = assembler(skip_special_tokens=False)
    assert play(target, [delta([1, EOS], STOP)])[0].outputs[0].text == "<s>"


def test_a_stop_string_cuts_text_ends_the_choice_and_tells_the_engine() -> None:
    target = assembler(stop=["END"])
    tokens = encode("one EN") + encode("D two")
    outputs, aborts = [], []
    for token in tokens:
        output = target.push(delta([token]))
        aborts += target.aborts
        outputs += [output] if output else []
        if target.finished:
            break
    late = [target.push(delta(encode("late"))), target.push(delta([], ABORT))]
    assert late == [None, None]
    assert target.aborts == []
    assert aborts == [0]
    assert "".join(output.outputs[0].text for output in outputs) == "one "
    last = outputs[-1].outputs[0]
    assert (last.finish_reason, last.stop_reason) == ("stop", "END")
    assert outputs[-1].finished
    taken = [token for output in outputs for token in output.outputs[0].token_ids]
    assert taken == tokens[: len(taken)]
    assert "END" in TOKENIZER.decode(taken)
    assert "END" not in TOKENIZER.decode(taken[:-1])


def test_tokens_after_the_stop_string_in_one_delta_are_dropped() -> None:
    tokens = encode("a.") + encode("bcd")
    target = assembler(stop=".", logprobs=0)
    logprobs = [TokenLogprobs(-1.0, 1, [], []) for _ in tokens]
    output = play(target, [delta(tokens, logprobs=logprobs)])[0].outputs[0]
    used = len(encode("a."))
    assert (output.text, output.token_ids, len(output.logprobs or [])) == ("a", tokens[:used], used)
    assert target.aborts == [0]


def test_a_stop_string_in_the_last_delta_needs_no_abort() -> None:
    target = assembler(stop=["b"])
    output = play(target, [delta(encode("a") + encode("b"), LENGTH)])[0].outputs[0]
    assert (output.text, output.finish_reason, output.stop_reason) == ("a", "stop", "b")
    assert target.aborts == []


def test_text_held_back_comes_out_at_the_end() -> None:
    target = assembler(stop=["END"])
    outputs = play(target, [delta(encode("xEN")), delta([EOS], STOP)])
    assert "".join(output.outputs[0].text for output in outputs) == "xEN"
    assert outputs[-1].outputs[0].stop_reason is None


def test_stop_strings_count_only_after_min_tokens() -> None:
    a, dot = encode("a")[0], encode(".")[0]
    target = assembler(stop=["."], min_tokens=2)
    outputs = play(target, [delta([token]) for token in (dot, dot, a, dot, a)])
    assert "".join(output.outputs[0].text for output in outputs) == "..a"
    assert sum(len(output.outputs[0].token_ids) for output in outputs) == 4


def test_abort_and_error_keep_what_was_generated() -> None:
    euro = TOKENIZER.encode("€")
    aborted = play(assembler(stop=["bc"]), [delta(encode("ab")), delta(euro[:1], ABORT)])
    assert "".join(output.outputs[0].text for output in aborted) == "ab\ufffd"
    assert aborted[-1].outputs[0].finish_reason == "abort"
    failed = play(assembler(), [delta(encode("a")), delta([], ERROR, error="the device is lost")])
    assert failed[-1].outputs[0].finish_reason == "error"
    assert failed[-1].outputs[0].stop_reason == "the device is lost"


def test_logprobs_name_the_chosen_token_first() -> None:
    a, b, c = (encode(letter)[0] for letter in "abc")
    entries = [TokenLogprobs(-2.0, 3, [b, c], [-0.5, -1.0]), TokenLogprobs(-0.25, 1, [c, b], [-0.25, -3.0])]
    outputs = play(assembler(logprobs=2), [delta([a, c], LENGTH, logprobs=entries)])
    shown = outputs[0].outputs[0].logprobs
    assert shown is not None
    readable = [[(t, p.logprob, p.rank, p.decoded_token) for t, p in place.items()] for place in shown]
    assert readable == [
        [(a, -2.0, 3, "a"), (b, -0.5, 1, "b"), (c, -1.0, 2, "c")],
        [(c, -0.25, 1, "c"), (b, -3.0, 2, "b")],
    ]
    assert outputs[0].outputs[0].cumulative_logprob == -2.25
    assert play(assembler(), [delta([a], LENGTH)])[0].outputs[0].logprobs is None


def test_logprobs_of_named_tokens_have_no_ranks() -> None:
    a, b, c = (encode(letter)[0] for letter in "abc")
    entries = [TokenLogprobs(-2.0, 3, [b, a, c], [-0.5, -2.0, -9.0])]
    shown = play(assembler(logprob_token_ids=[b, a, c]), [delta([a], LENGTH, logprobs=entries)])[0].outputs[0].logprobs
    assert shown is not None
    assert [(t, p.logprob, p.rank) for t, p in shown[0].items()] == [(a, -2.0, 3), (b, -0.5, None), (c, -9.0, None)]


def test_without_detokenizing_only_ids_come_out() -> None:
    output = play(assembler(detokenize=False), [delta(encode("abc"), LENGTH)])[0].outputs[0]
    assert (output.text, output.token_ids) == ("", encode("abc"))


def test_a_continuation_keeps_its_first_space() -> None:
    word = PIECES.encode("dog", add_special_tokens=False)
    texts = []
    for prompt in ((1,), (1, *PIECES.encode("the", add_special_tokens=False))):
        output = play(assembler(PIECES, prompt=prompt), [delta(word, LENGTH)])[0]
        texts.append(output.outputs[0].text)
    assert texts == ["dog", " dog"]


def test_counts_and_times() -> None:
    def times(*values: float) -> RequestTimes:
        return RequestTimes(*values)

    target = assembler(n=2, kind=DELTA)
    outputs = play(
        target,
        [
            delta(encode("a"), num_cached=16),
            delta(encode("b"), LENGTH, index=1, num_cached=32, times=times(1, 3, 4, 9), num_preemptions=1),
            delta(encode("c"), LENGTH, times=times(1, 2, 5, 8), num_preemptions=2),
        ],
    )
    assert [output.num_cached_tokens for output in outputs] == [16, 16, 16]
    assert [output.times for output in outputs] == [None, None, times(1, 2, 4, 9)]
    assert outputs[-1].num_preemptions == 3


def test_times_of_a_request_that_a_stop_string_ended() -> None:
    output = play(assembler(stop=["a"]), [delta(encode("a"))])[0]
    assert output.times is not None
    assert output.times.arrival == 1.0
    assert 1.0 < output.times.first_token <= output.times.finished


TEXT = "the quick brown fox jumps over the lazy dog, and the dog does not mind."


@settings(max_examples=200)
@given(
    data=st.data(),
    start=st.integers(0, 30),
    length=st.integers(1, 30),
    include=st.booleans(),
    min_tokens=st.integers(0, 5),
)
def test_all_kinds_agree_with_the_plain_definition(
    data: st.DataObject, start: int, length: int, include: bool, min_tokens: int
) -> None:
    """The choice ends with the first token that completes a stop string in the text after `min_tokens` tokens."""
    text = TEXT[start : start + length]
    tokens = encode(text)
    pieces = st.builds(lambda at, size: text[at : at + size] or "?", st.integers(0, length - 1), st.integers(1, 6))
    stops = data.draw(st.lists(pieces, max_size=3))
    cuts = data.draw(st.lists(st.integers(0, len(tokens)), max_size=5))
    places = sorted({0, *cuts, len(tokens)})
    deltas = [delta(tokens[a:b]) for a, b in itertools.pairwise(places)] + [delta([EOS], STOP)]
    free = len(TOKENIZER.decode(tokens[:min_tokens]))
    ends = [(free + at + len(stop), free + at, stop) for stop in stops if (at := text[free:].find(stop)) >= 0]
    if ends:
        end, begin, stop = min(ends)
        expected = text[: end if include else begin], stop
        count = next(n for n in range(len(tokens) + 1) if len(TOKENIZER.decode(tokens[:n])) >= end)
    else:
        expected, count = (text, None), len(tokens) + 1

    params: dict[str, Any] = {"stop": stops, "include_stop_str_in_output": include, "min_tokens": min_tokens}
    for kind in OutputKind:
        outputs = play(assembler(kind=kind, max_tokens=None, **params), deltas)
        choices = [output.outputs[0] for output in outputs]
        shown = choices if kind is DELTA else choices[-1:]
        assert ("".join(choice.text for choice in shown), choices[-1].stop_reason) == expected
        assert [token for choice in shown for token in choice.token_ids] == [*tokens, EOS][:count]
        assert [choice.finish_reason for choice in choices] == [None] * (len(choices) - 1) + ["stop"]
        if kind is CUMULATIVE:
            assert all(after.text.startswith(before.text) for before, after in itertools.pairwise(choices))
