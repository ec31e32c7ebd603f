"""Text that spells a special token and is text: it gets no special token, and what surrounds it keeps its tokens."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from toy_gguf import write_gguf
from toy_tokenizers import byte_level, sentencepiece

from octavo.text.tokenizers.literal import LiteralText, SpecialTokens, framed, part_of
from octavo.text.tokenizers.tokenizer import Tokenizer


def metaspace() -> tokenizers.Tokenizer:
    """Llama 2's kind in the newer form: only the beginning of a text gets a space, and a mark takes those beside it."""
    backend = sentencepiece(prefix=False)
    backend.normalizer = None
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.add_special_tokens([tokenizers.AddedToken("<end>", lstrip=True, rstrip=True, special=True)])
    return backend


def unigram() -> tokenizers.Tokenizer:
    """T5's kind, whose vocabulary would find a special token's text by itself."""
    pieces = [("<unk>", 0.0), ("<s>", -1.0), ("</s>", -1.0), *((char, -5.0) for char in "abcdefghijkl <>/s|\n")]
    backend = tokenizers.Tokenizer(tokenizers.models.Unigram(pieces, unk_id=0))
    backend.add_special_tokens(["<s>", "</s>"])
    return backend


KINDS = {
    "bytes": Tokenizer(byte_level()),
    "pieces": Tokenizer(sentencepiece()),
    "bare pieces": Tokenizer(sentencepiece(prefix=False)),
    "metaspace": Tokenizer(metaspace()),
    "unigram": Tokenizer(unigram()),
}
PARTS = st.sampled_from(
    ["<s>", "</s>", "<end>", "<", "s>", "</", " ", "  ", "a", "dog", "\n", "<tool>", "two words", "é"]
)
TEXTS = st.lists(PARTS, max_size=12).map("".join)


@pytest.mark.parametrize("kind", KINDS)
@given(text=TEXTS)
def test_without_literal_spans_the_tokens_are_the_same(kind: str, text: str) -> None:
    tokenizer = KINDS[kind]
    for special in (False, True):
        same = tokenizer.encode(text, add_special_tokens=special)
        assert tokenizer.encode(LiteralText(text, ()), add_special_tokens=special) == same


@pytest.mark.parametrize("kind", KINDS)
@given(text=TEXTS, data=st.data())
def test_literal_spans_are_text(kind: str, text: str, data: st.DataObject) -> None:
    tokenizer = KINDS[kind]
    spans = tokenizer.special.find(text)
    literal = [span for span in spans if data.draw(st.booleans())]
    named = [text[begin:end] for begin, end in spans if (begin, end) not in literal]
    ids = tokenizer.encode(LiteralText(text, literal), add_special_tokens=False)
    marks = set(tokenizer.special.tokens.values()) - {tokenizer.backend.token_to_id("<unk>")}
    assert [one for one in ids if one in marks] == [tokenizer.special.tokens[one] for one in named if one != "<unk>"]
    if kind in ("bytes", "pieces", "bare pieces"):  # the others drop spaces, or have no token for some characters
        plain = tokenizer.decode(tokenizer.encode(text, add_special_tokens=False), skip_special_tokens=False)
        assert tokenizer.decode(ids, skip_special_tokens=False).replace(" ", "") == plain.replace(" ", "")


@given(text=TEXTS, data=st.data())
def test_offsets_are_places_in_the_text_itself(text: str, data: st.DataObject) -> None:
    tokenizer = KINDS["bytes"]
    literal = [span for span in tokenizer.special.find(text) if data.draw(st.booleans())]
    ids, offsets = tokenizer.encode_with_offsets(LiteralText(text, literal), add_special_tokens=False)
    for token, (begin, end) in zip(ids, offsets, strict=True):
        if token in tokenizer.special_ids or "é" not in text:
            assert text[begin:end] == tokenizer.token_text(token)


def test_a_long_text_takes_the_same_way() -> None:
    tokenizer = KINDS["bytes"]
    text = "dog <s> " * 3000
    spans = tokenizer.special.find(text)
    ids = tokenizer.encode(LiteralText(text, spans[1:]), add_special_tokens=False)
    assert (ids.count(1), len(spans)) == (1, 3000)
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_the_tokenizer_of_a_gguf_file(tmp_path: Path) -> None:
    from octavo.text.tokenizers.tokenizer import _from_gguf

    path = tmp_path / "m.gguf"
    vocabulary = json.loads(byte_level().to_str())["model"]
    tokens = [token for token, _ in sorted(vocabulary["vocab"].items(), key=lambda item: item[1])]
    merges = [" ".join(one) if isinstance(one, list) else one for one in vocabulary["merges"]]
    write_gguf(
        path,
        {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "gpt-2",
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.token_type": [3, 3, 3] + [1] * (len(tokens) - 3),
            "tokenizer.ggml.merges": merges,
        },
    )
    tokenizer = _from_gguf(path)
    text = "<s>the dog </s> and<s>"
    ids = tokenizer.encode(LiteralText(text, tokenizer.special.find(text)[1:]), add_special_tokens=False)
    assert (ids[0], set(ids[1:]) & {0, 1, 2}) == (1, set())
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_parts_and_copies_keep_what_is_literal() -> None:
    text = LiteralText("a<s>b<s>c", [(1, 4), (5, 8)])
    assert pickle.loads(pickle.dumps(text)).literal == text.literal
    part = part_of(text, 4, 9)
    assert (part, getattr(part, "literal", None)) == ("b<s>c", ((1, 4),))
    assert type(part_of(text, 2, 5)) is str
    assert part_of("plain", 1, 3) == "la"


def test_half_a_surrogate_pair_holds_no_token() -> None:
    assert SpecialTokens(byte_level()).find("<s>\ud800") == []


def test_a_special_token_that_merges_would_make() -> None:
    backend = tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")]))
    backend.add_special_tokens(["ab"])
    assert Tokenizer(backend).encode(LiteralText("abab", [(2, 4)]), add_special_tokens=False) == [2, 0, 1]


def test_texts_around_a_special_token() -> None:
    """Not around what only spells it; what is literal stays literal."""
    text = LiteralText("a<s>b<s>c<s></s>", [(5, 8), (12, 16)])
    found = framed(text, "<s>", "[", "]]")
    assert str(found) == "a[<s>]]b<s>c[<s>]]</s>"
    assert isinstance(found, LiteralText)
    assert [found[begin:end] for begin, end in found.literal] == ["<s>", "</s>"]
    assert found.literal == ((8, 11), (18, 22))
    assert framed("a<s>", "<s>", "", "!") == "a<s>!"
    assert not isinstance(framed("a<s>", "<s>", "", "!"), LiteralText)
