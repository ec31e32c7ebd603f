from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import toy_tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders
from toy_gguf import LLAMA, write_gguf

from octavo.core.errors import ModelFileError
from octavo.hub.files import ModelFiles
from octavo.hub.gguf_file import read_gguf
from octavo.hub.resolve import resolve
from octavo.text.tokenizers.gguf import build_backend
from octavo.text.tokenizers.gguf_models import merges_from_scores
from octavo.text.tokenizers.pretokenizers import PRE_TOKENIZERS
from octavo.text.tokenizers.tokenizer import Tokenizer, load_tokenizer

NORMAL, UNKNOWN, CONTROL, OWN, BYTE = 1, 2, 3, 4, 6


def byte_level_keys(pre: str | None = "gpt-2") -> dict[str, Any]:
    model = json.loads(toy_tokenizers.byte_level().to_str())
    tokens = sorted(model["model"]["vocab"], key=model["model"]["vocab"].__getitem__)
    added = [token["content"] for token in model["added_tokens"] if token["id"] >= len(tokens)]
    kinds = [CONTROL if token in toy_tokenizers.SPECIAL else NORMAL for token in tokens] + [OWN] * len(added)
    keys = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": [*tokens, *added],
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": [" ".join(merge) for merge in model["model"]["merges"]],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.chat_template": "main",
        "tokenizer.chat_templates": ["tool_use"],
        "tokenizer.chat_template.tool_use": "tools",
    }
    return keys | ({"tokenizer.ggml.pre": pre} if pre else {})


def sentencepiece_keys() -> dict[str, Any]:
    """As llama.cpp's converter writes them: scores fall with the rank of the merge that makes a token."""
    model = json.loads(toy_tokenizers.sentencepiece().to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    rank: dict[str, int] = {}
    for number, (left, right) in enumerate(model["merges"]):
        rank.setdefault(left + right, number)
    scores = [-float(rank[token]) if token in rank else -1e6 if len(token) == 1 else 0.0 for token in tokens]
    kinds = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * (len(tokens) - 259)]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }


def unigram_keys() -> dict[str, Any]:
    vocabulary = json.loads(toy_tokenizers.unigram().to_str())["model"]["vocab"]
    return {
        "tokenizer.ggml.model": "t5",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": [token for token, _ in vocabulary],
        "tokenizer.ggml.scores": [float(score) for _, score in vocabulary],
        "tokenizer.ggml.token_type": [UNKNOWN, CONTROL, CONTROL, *[NORMAL] * (len(vocabulary) - 3)],
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.add_eos_token": True,
        "tokenizer.ggml.add_space_prefix": True,
        "tokenizer.ggml.remove_extra_whitespaces": True,
    }


def word_piece_keys(original: Backend) -> dict[str, Any]:
    """As llama.cpp's converter writes them: pieces at the beginning of words are marked, not those inside."""
    vocabulary = original.get_vocab(with_added_tokens=True)
    words = sorted(vocabulary, key=vocabulary.__getitem__)
    space = toy_tokenizers.SPACE
    marks = {"[CLS]", "[SEP]", "[UNK]", "[PAD]", "[MASK]"}
    tokens = [word if word in marks else word.removeprefix("##") if "##" in word else space + word for word in words]
    return {
        "tokenizer.ggml.model": "bert",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [CONTROL if word in marks else NORMAL for word in words],
        "tokenizer.ggml.unknown_token_id": vocabulary["[UNK]"],
        "tokenizer.ggml.cls_token_id": vocabulary["[CLS]"],
        "tokenizer.ggml.seperator_token_id": vocabulary["[SEP]"],
    }


def load(folder: Path, keys: dict[str, Any]) -> Tokenizer:
    return load_tokenizer(resolve(str(write_gguf(folder / "toy.gguf", LLAMA | keys))))


@pytest.fixture(scope="module")
def rebuilt(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Tokenizer, Backend]]:
    """Tokenizers that went through a GGUF file, each with the one that it was made from."""
    bare = sentencepiece_keys() | {"tokenizer.ggml.add_space_prefix": False}
    return {
        "bytes": (load(tmp_path_factory.mktemp("b"), byte_level_keys()), toy_tokenizers.byte_level()),
        "pieces": (load(tmp_path_factory.mktemp("p"), sentencepiece_keys()), toy_tokenizers.sentencepiece()),
        "bare": (load(tmp_path_factory.mktemp("n"), bare), toy_tokenizers.sentencepiece(prefix=False)),
        "unigram": (load(tmp_path_factory.mktemp("u"), unigram_keys()), toy_tokenizers.unigram()),
        "words": (load(tmp_path_factory.mktemp("w"), word_piece_keys(toy_tokenizers.bert())), toy_tokenizers.bert()),
    }


@pytest.mark.parametrize("kind", ["bytes", "pieces", "bare", "unigram", "words"])
@given(text=st.text(max_size=40) | st.sampled_from(toy_tokenizers.TEXT) | st.text(alphabet="the dogx <s>", max_size=40))
def test_a_rebuilt_tokenizer_gives_the_same_ids_and_texts(
    rebuilt: dict[str, tuple[Tokenizer, Backend]], kind: str, text: str
) -> None:
    tokenizer, original = rebuilt[kind]
    ids = tokenizer.encode(text)
    assert ids == original.encode(text).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == original.decode(ids, skip_special_tokens=False)


def test_the_union_with_the_highest_score_merges_first() -> None:
    vocabulary = {"a": 0, "b": 1, "c": 2, "abc": 3, "ab": 4, "bc": 5}
    scores = {"a": -9.0, "abc": -1.0, "ab": -3.0, "bc": -2.0}
    assert merges_from_scores(scores, vocabulary) == [("a", "bc"), ("ab", "c"), ("b", "c"), ("a", "b")]


def test_special_tokens_and_templates(rebuilt: dict[str, tuple[Tokenizer, Backend]]) -> None:
    tokenizer, _ = rebuilt["bytes"]
    assert [tokenizer.named_tokens[name] for name in ("bos_token", "eos_token")] == ["<s>", "</s>"]
    assert tokenizer.special_ids == {0, 1, 2}
    assert tokenizer.chat_templates == {"default": "main", "tool_use": "tools"}
    assert tokenizer.decode(tokenizer.encode("<s>a<tool>")) == "a<tool>"
    assert rebuilt["pieces"][0].named_tokens["unk_token"] == "<unk>"


@pytest.mark.parametrize(
    ("keys", "first", "last"),
    [
        ({}, False, False),
        ({"tokenizer.ggml.add_bos_token": True}, True, False),
        ({"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.add_eos_token": True}, True, True),
        ({"tokenizer.ggml.pre": "llama-bpe"}, True, False),
        ({"tokenizer.ggml.pre": "llama-bpe", "tokenizer.ggml.add_bos_token": False}, False, False),
    ],
)
def test_marks_at_the_ends(tmp_path: Path, keys: dict[str, Any], first: bool, last: bool) -> None:
    tokenizer = load(tmp_path, byte_level_keys() | keys)
    ids = tokenizer.encode("dog")
    assert (ids[0] == 1, ids[-1] == 2) == (first, last)
    plain = tokenizer.encode("dog", add_special_tokens=False)
    assert ids[first : len(ids) - last] == plain


WORDS = "Hello's HELLO'S  12345 x1²\n\n ok !?\r\n  日本 helloWorld/\n"


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("gpt-2", "Hello|'s| HELLO|'|S| | 12345| x|1²|\n\n| ok| !?|\r\n | 日本| helloWorld|/|\n"),
        ("smollm", "Hello|'s| HELLO|'|S|  |1|2|3|4|5| x|1|²|\n\n| ok| !?|\r\n | 日本| helloWorld|/|\n"),
        ("llama-bpe", "Hello|'s| HELLO|'S| | |123|45| x|1²|\n\n| ok| !?\r\n| | 日本| helloWorld|/\n"),
        ("qwen2", "Hello|'s| HELLO|'S| | |1|2|3|4|5| x|1|²|\n\n| ok| !?\r\n| | 日本| helloWorld|/\n"),
        ("gpt-4o", "Hello's| HELLO'S| | |123|45| x|1²|\n\n| ok| !?\r\n| | 日本| hello|World|/\n"),
        ("command-r", "Hello|'s| HELLO|'|S|  |1|2|3|4|5| x|1|²|\n\n| ok| !?|\r\n | 日本| helloWorld|/|\n"),
        ("deepseek-v3", "Hello|'s| HELLO|'S|  |123|45| x|1²|\n\n| ok| !?\r\n|  |日本| helloWorld|/\n"),
        ("viking", "Hello's| HELLO'S| | |1|2|3|4|5| x|1|²|\n\n| ok| !?\r\n | 日本| helloWorld/|\n"),
        ("tiny_aya", "Hello's| HELLO'S|  |12|345| x|1²|\n\n| ok| !?\r\n| | 日本| hello|World|/\n"),
        ("tekken", "Hello|'s| HELLO|'S| | |1|2|3|4|5| x|1|²|\n\n| ok| !?\r\n| | 日本| hello|World|/\n"),
    ],
)
def test_words_are_cut_by_the_named_rules(pre: str, expected: str) -> None:
    cut = PRE_TOKENIZERS[pre].build().pre_tokenize_str(WORDS)
    assert "|".join(WORDS[start:end] for _, (start, end) in cut) == expected


@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
def test_all_rules_keep_all_of_a_text(pre: str) -> None:
    text = " ".join(toy_tokenizers.TEXT[:4]) + WORDS
    cut = PRE_TOKENIZERS[pre].build().pre_tokenize_str(text)
    alphabet = decoders.ByteLevel()
    assert alphabet.decode(["".join(word for word, _ in cut)]) == text


def test_two_texts_have_the_marks_of_their_kind(rebuilt: dict[str, tuple[Tokenizer, Backend]]) -> None:
    for kind in ("unigram", "words"):
        tokenizer, original = rebuilt[kind]
        expected = original.encode("the dog", "a fox")
        assert tokenizer.encode_within("the dog", "a fox") == (expected.ids, expected.type_ids)


def test_a_real_vocabulary_of_bert(tmp_path: Path, minilm_files: ModelFiles) -> None:
    original = load_tokenizer(minilm_files)
    rebuilt = load(tmp_path, word_piece_keys(original.backend))
    corpus = (Path(__file__).parents[4] / "benchmarks/data/prose.txt").read_text(encoding="utf-8")
    for line in [*corpus.splitlines()[:400], *toy_tokenizers.TEXT[:4]]:
        assert rebuilt.encode(line) == original.encode(line)


def charsmap(source: str, target: str) -> bytes:
    """A SentencePiece table that replaces one text: a double array with one path, and the replacements."""
    units, at = [0] * 2048, 0
    units[0] = 256 << 10
    for n, byte in enumerate(source.encode()):
        at = (at ^ (units[at] >> 10)) ^ byte
        last = n == len(source.encode()) - 1
        units[at] = ((256 * (n + 2)) << 10) | (last << 8) | byte
    units[at ^ (units[at] >> 10)] = 1 << 31
    table = b"".join(unit.to_bytes(4, "little") for unit in units)
    return len(table).to_bytes(4, "little") + table + target.encode() + b"\0"


def test_the_table_of_characters_is_applied(tmp_path: Path) -> None:
    table = list(charsmap("\N{LATIN SMALL LIGATURE FI}", "fi"))
    tokenizer = load(tmp_path, unigram_keys() | {"tokenizer.ggml.precompiled_charsmap": table})
    assert tokenizer.encode("\N{LATIN SMALL LIGATURE FI}x") == tokenizer.encode("fix")


def test_qwen_composes_characters(tmp_path: Path) -> None:
    tokenizer = load(tmp_path, byte_level_keys("qwen2"))
    assert tokenizer.encode("e\u0301") == tokenizer.encode("é")


def test_unknown_rules_are_refused_with_those_that_are_known(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"'martian' .*known are: .*smollm.*llama-bpe.*--tokenizer"):
        load(tmp_path, byte_level_keys("martian"))


def test_no_rules_at_all_are_gpt2s_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        tokenizer = load(tmp_path, byte_level_keys(None))
    assert "tokenizer.ggml.pre" in caplog.text
    assert tokenizer.encode("a 123") == toy_tokenizers.byte_level().encode("a 123").ids


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"tokenizer.ggml.model": "rwkv"}, r"kind 'rwkv'; known are 'gpt2', 'llama', 'bert', 't5'"),
        ({"tokenizer.ggml.merges": ["no-space-here"]}, "no tokenizer can be built"),
        ({"tokenizer.ggml.merges": ["zz yy"]}, "no tokenizer can be built"),
        ({"tokenizer.ggml.token_type": [1, 2]}, "no tokenizer can be built"),
    ],
)
def test_metadata_that_make_no_sense(tmp_path: Path, change: dict[str, Any], match: str) -> None:
    with pytest.raises(ModelFileError, match=match):
        load(tmp_path, byte_level_keys() | change)


def test_missing_metadata_are_named(tmp_path: Path) -> None:
    keys = byte_level_keys()
    del keys["tokenizer.ggml.merges"]
    with pytest.raises(ModelFileError, match=r"lacks the metadata tokenizer\.ggml\.merges"):
        load(tmp_path, keys)


@pytest.mark.parametrize(("arch", "takes"), [("phi3", True), ("llama", False)])
def test_marks_of_phi_3_take_the_spaces_behind_them(tmp_path: Path, arch: str, takes: bool) -> None:
    """As in its tokenizer.json, so that a line end of the chat template is no token; <s> leaves it."""
    path = write_gguf(tmp_path / "toy.gguf", sentencepiece_keys(), arch=arch)
    file = read_gguf(path)
    backend = build_backend(file)
    ids = [backend.encode(f"{mark}\n the", add_special_tokens=False).ids for mark in ("</s>", "<s>")]
    plain = [backend.encode(f"{mark}the", add_special_tokens=False).ids for mark in ("</s>", "<s>")]
    assert [one == other for one, other in zip(ids, plain, strict=True)] == [takes, False]


def test_ends_of_turns_are_marks_whatever_their_type(tmp_path: Path) -> None:
    """Some files have them as ordinary tokens; they end answers, so they are no text of one."""
    keys = byte_level_keys()
    keys["tokenizer.ggml.tokens"] = [*keys["tokenizer.ggml.tokens"], "<|im_end|>"]
    keys["tokenizer.ggml.token_type"] = [*keys["tokenizer.ggml.token_type"], NORMAL]
    number = len(keys["tokenizer.ggml.tokens"]) - 1
    loaded = load(tmp_path, keys)
    assert loaded.encode("the<|im_end|>", add_special_tokens=False)[-1] == number
    assert loaded.decode(loaded.encode("the<|im_end|>", add_special_tokens=False)) == "the"
