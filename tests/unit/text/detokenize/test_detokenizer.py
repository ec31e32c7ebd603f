from __future__ import annotations

import pytest
import toy_tokenizers
from hypothesis import example, given
from hypothesis import strategies as st

from octavo.text.detokenize.detokenizer import Detokenizer
from octavo.text.tokenizers.tokenizer import Tokenizer

BYTES = Tokenizer(toy_tokenizers.byte_level(merges=60))
PIECES = Tokenizer(toy_tokenizers.sentencepiece())
BARE_PIECES = Tokenizer(toy_tokenizers.sentencepiece(prefix=False))
WORDS = Tokenizer(toy_tokenizers.word_piece())
ALL = {"bytes": BYTES, "pieces": PIECES, "bare": BARE_PIECES, "words": WORDS}


def stream(tokenizer: Tokenizer, ids: list[int], *, skip: bool = True, after_text: bool = False) -> list[str]:
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip, after_text=after_text)
    return [*map(detokenizer.push, ids), detokenizer.flush()]


@pytest.mark.parametrize("kind", ALL)
@given(data=st.data(), skip=st.booleans())
def test_pieces_joined_are_the_whole(kind: str, data: st.DataObject, skip: bool) -> None:
    tokenizer = ALL[kind]
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 2), max_size=40))
    assert "".join(stream(tokenizer, ids, skip=skip)) == tokenizer.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("kind", ["bytes", "pieces", "bare"])
@given(text=st.text(max_size=40))
@example(text="🙂🙃")
@example(text=" x")
@example(text="  x")
@example(text="日本語")
def test_real_text_is_never_given_out_as_half_a_character(kind: str, text: str) -> None:
    tokenizer = ALL[kind]
    ids = tokenizer.encode(text, add_special_tokens=False)
    pieces = stream(tokenizer, ids, skip=False)
    whole = tokenizer.decode(ids, skip_special_tokens=False)
    assert "".join(pieces) == whole
    assert "".join(pieces).count("\ufffd") == text.count("\ufffd")


def raw(data: bytes) -> list[int]:
    by_bytes = {BYTES.token_bytes(token): token for token in range(3, 3 + 256)}
    return [by_bytes[bytes([byte])] for byte in data]


def test_a_character_comes_out_with_its_last_byte() -> None:
    assert stream(BYTES, raw("a🙂b".encode())) == ["a", "", "", "", "🙂", "b", ""]


def test_an_invalid_byte_comes_out_as_soon_as_it_is_known() -> None:
    assert stream(BYTES, raw(b"\xffA")) == ["\ufffd", "A", ""]
    assert stream(BYTES, raw(b"\xe2\x82A")) == ["", "", "\ufffdA", ""]


def test_an_unfinished_character_comes_out_at_the_end_only() -> None:
    assert stream(BYTES, raw("ab€".encode()[:-1])) == ["a", "b", "", "", "\ufffd"]


def test_special_tokens_do_not_tear_characters_apart() -> None:
    first, rest = raw("é".encode())
    assert stream(BYTES, [first, 1, rest]) == ["", "", "é", ""]


def test_first_space_of_a_text_and_of_a_continuation() -> None:
    ids = PIECES.encode("the dog", add_special_tokens=False)
    assert "".join(stream(PIECES, ids)) == "the dog"
    assert "".join(stream(PIECES, ids, after_text=True)) == " the dog"
    spaced = PIECES.encode("  the dog", add_special_tokens=False)
    assert "".join(stream(PIECES, spaced)) == "  the dog"
    assert "".join(stream(PIECES, [1, *ids], skip=False)) == "<s> the dog"
    assert "".join(stream(BARE_PIECES, BARE_PIECES.encode(" the", add_special_tokens=False))) == " the"


def test_a_long_sequence_costs_what_its_tokens_cost() -> None:
    """Each token is decoded a bounded number of times, whatever came before it."""
    calls = 0

    class Counting(Tokenizer):
        def decode(self, ids, *, skip_special_tokens=True):
            nonlocal calls
            calls += len(list(ids))
            return super().decode(ids, skip_special_tokens=skip_special_tokens)

        def token_bytes(self, token: int) -> bytes:
            nonlocal calls
            calls += 1
            return super().token_bytes(token)

    for make in (toy_tokenizers.byte_level, toy_tokenizers.sentencepiece, toy_tokenizers.word_piece):
        calls = 0
        tokenizer = Counting(make())
        ids = tokenizer.encode("the quick brown fox " * 100, add_special_tokens=False)
        stream(tokenizer, ids)
        assert calls <= 64 * len(ids)
        calls = 0
        stream(tokenizer, [tokenizer.vocab_size - 1] * 2000)
        assert calls <= 64 * 2000
