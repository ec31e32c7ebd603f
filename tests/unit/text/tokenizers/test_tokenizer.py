from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import tokenizers
import toy_tokenizers
import transformers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers.processors import TemplateProcessing

from octavo.core.errors import InvalidRequestError, ModelFileError
from octavo.hub.files import ModelFiles
from octavo.text.tokenizers.token_bytes import Decoding
from octavo.text.tokenizers.tokenizer import Tokenizer, load_tokenizer

BYTES = Tokenizer(toy_tokenizers.byte_level())
PIECES = Tokenizer(toy_tokenizers.sentencepiece())
BARE_PIECES = Tokenizer(toy_tokenizers.sentencepiece(prefix=False))
WORDS = Tokenizer(toy_tokenizers.word_piece())
TEXTS = ["Hello, world!", " leading", "Grüße 日本語 🙂", "a\n\nb", "", "  ", "<tool>x", "two words", "<s>x</s>"]


def ids_of(tokenizer: Tokenizer) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=30)


def test_kinds_are_recognized() -> None:
    assert BYTES.decoding == Decoding("bytes")
    assert PIECES.decoding == Decoding("pieces", strip=1)
    assert BARE_PIECES.decoding == Decoding("pieces")
    assert WORDS.decoding == Decoding("other")


@pytest.mark.parametrize("tokenizer", [BYTES, PIECES, BARE_PIECES], ids=["bytes", "pieces", "bare"])
@pytest.mark.parametrize("text", TEXTS)
def test_text_comes_back(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert ids == tokenizer.backend.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == tokenizer.backend.decode(ids, skip_special_tokens=False)
    if "<" not in text:
        assert tokenizer.decode(ids) == text


@given(ids_of(BYTES), st.booleans())
def test_byte_level_decoding_is_the_librarys(ids: list[int], skip: bool) -> None:
    assert BYTES.decode(ids, skip_special_tokens=skip) == BYTES.backend.decode(ids, skip_special_tokens=skip)


@given(ids_of(PIECES), st.booleans())
def test_piece_decoding_is_the_librarys_where_bytes_are_whole_characters(ids: list[int], skip: bool) -> None:
    ours = PIECES.decode(ids, skip_special_tokens=skip)
    theirs = PIECES.backend.decode(ids, skip_special_tokens=skip)
    assert ours == theirs or "\ufffd" in theirs


def test_a_broken_byte_spoils_only_itself() -> None:
    euro = [PIECES.backend.token_to_id(f"<0x{byte:02X}>") for byte in "€".encode()]
    lone = PIECES.backend.token_to_id("<0xFF>")
    assert PIECES.decode([*euro, lone, *euro]) == "€\ufffd€"


def test_special_tokens() -> None:
    assert BYTES.special_ids == {0, 1, 2}
    ids = BYTES.encode("<s>hi<tool></s>")
    assert ids[0] == 1
    assert ids[-1] == 2
    assert BYTES.decode(ids) == "hi<tool>"
    assert BYTES.decode(ids, skip_special_tokens=False) == "<s>hi<tool></s>"
    assert PIECES.encode("a")[0] == 1
    assert PIECES.encode("a", add_special_tokens=False)[0] != 1


def test_single_tokens() -> None:
    text = " naïve 日"
    ids = BYTES.encode(text)
    assert b"".join(map(BYTES.token_bytes, ids)) == text.encode()
    word = next(token for token in PIECES.backend.get_vocab() if len(token) > 2 and token.startswith("▁"))
    assert PIECES.token_text(PIECES.backend.token_to_id(word)) == word.replace("▁", " ")
    assert PIECES.token_bytes(PIECES.backend.token_to_id("<0xE2>")) == b"\xe2"
    assert PIECES.token_text(PIECES.backend.token_to_id("<0xE2>")) == "\ufffd"
    assert BYTES.token_text(2) == "</s>"


@pytest.mark.parametrize("tokenizer", [BYTES, PIECES, WORDS], ids=["bytes", "pieces", "words"])
def test_ids_outside_the_vocabulary_have_no_text(tokenizer: Tokenizer) -> None:
    """Models have more rows in their head than tokens; those may be sampled."""
    beyond = tokenizer.vocab_size
    inside = tokenizer.encode("the dog", add_special_tokens=False)
    assert tokenizer.decode([beyond, *inside, beyond + 7]) == tokenizer.decode(inside)
    assert tokenizer.token_text(beyond) == ""
    assert tokenizer.token_bytes(-1) == tokenizer.token_bytes(1 << 40) == b""


def test_half_a_surrogate_pair_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match=r"at character 2 it holds U\+D83D"):
        BYTES.encode("ab\ud83dcd")


@pytest.mark.parametrize("tokenizer", [BYTES, PIECES, BARE_PIECES, WORDS])
@pytest.mark.parametrize("special", [True, False])
def test_a_long_text_has_the_tokens_that_the_library_gives_it(tokenizer: Tokenizer, special: bool) -> None:
    text = "The dog </s> is \N{GRINNING FACE} ¿qué? " * 400
    assert len(text) > 8192
    assert (
        tokenizer.encode(text, add_special_tokens=special)
        == tokenizer.backend.encode(text, add_special_tokens=special).ids
    )
    with pytest.raises(InvalidRequestError, match=r"holds U\+D83D"):
        tokenizer.encode(text + "\ud83d")
    with pytest.raises(InvalidRequestError, match="must be text, got list"):
        tokenizer.encode([1] * 9000)  # type: ignore[arg-type]


@given(st.text(max_size=50))
def test_no_token_stands_for_more_characters_than_the_longest(text: str) -> None:
    assert len(BYTES.encode(text)) * BYTES.max_token_chars >= len(text)


def write_folder(folder: Path, config: dict, **files: object) -> ModelFiles:
    toy_tokenizers.byte_level().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return ModelFiles(name="toy", path=folder, format="safetensors", weights=(), config={})


def test_folder(tmp_path: Path) -> None:
    files = write_folder(
        tmp_path,
        {"bos_token": {"content": "<s>", "lstrip": False}, "chat_template": "A"},
        special_tokens_map={"eos_token": "</s>", "bos_token": "x"},
    )
    tokenizer = load_tokenizer(files)
    assert [tokenizer.named_tokens[name] for name in ("bos_token", "eos_token")] == ["<s>", "</s>"]
    assert tokenizer.chat_templates == {"default": "A"}
    assert tokenizer.encode("the dog") == BYTES.encode("the dog")


@pytest.mark.parametrize("kind", ["PreTrainedTokenizerFast", "LlamaTokenizer", "Qwen2Tokenizer"])
@pytest.mark.parametrize("in_file", [True, False])
@pytest.mark.parametrize("stated", [True, False])
def test_marks_at_the_ends_are_those_of_tokenizer_json(kind: str, in_file: bool, stated: bool, tmp_path: Path) -> None:
    """Transformers 5 ignores add_bos_token and add_eos_token beside that file, too."""
    flags = {"add_bos_token": stated, "add_eos_token": stated, "bos_token": "<s>", "eos_token": "</s>"}
    files = write_folder(tmp_path, {"tokenizer_class": kind, **flags})
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    backend = toy_tokenizers.byte_level()
    if in_file:
        backend.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    backend.save(str(tmp_path / "tokenizer.json"))
    found = load_tokenizer(files).encode("a dog")
    assert found == transformers.AutoTokenizer.from_pretrained(tmp_path)("a dog").input_ids
    assert (found[0] == 1) == in_file


def test_a_folder_without_one_names_every_remedy(tmp_path: Path) -> None:
    files = ModelFiles(name="toy", path=tmp_path, format="safetensors", weights=(), config={})
    with pytest.raises(ModelFileError, match=r"--tokenizer MODEL \(a folder, a .gguf file or a name\)"):
        load_tokenizer(files)


def test_templates_by_name_and_in_files(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}]
    files = write_folder(tmp_path, {"chat_template": named})
    assert load_tokenizer(files).chat_templates == {"default": "D", "tool_use": "T"}
    (tmp_path / "chat_template.jinja").write_text("FILE")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "rag.jinja").write_text("R")
    assert load_tokenizer(files).chat_templates == {"default": "FILE", "tool_use": "T", "rag": "R"}


def test_named_tokens_are_special_even_if_the_file_forgot(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_folder(tmp_path, {"eos_token": "<tool>"}))
    assert tokenizer.decode(tokenizer.encode("a<tool>")) == "a"


def test_no_padding_or_truncation_of_the_files(tmp_path: Path) -> None:
    files = write_folder(tmp_path, {})
    backend = toy_tokenizers.byte_level()
    backend.enable_truncation(2)
    backend.enable_padding(length=50)
    backend.save(str(tmp_path / "tokenizer.json"))
    assert load_tokenizer(files).encode("the quick fox") == BYTES.encode("the quick fox")


def test_absent_and_corrupt_files_are_named(tmp_path: Path) -> None:
    files = ModelFiles(name="toy", path=tmp_path, format="safetensors", weights=(), config={})
    with pytest.raises(ModelFileError, match=r"has no tokenizer\.json"):
        load_tokenizer(files)
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0"}')
    with pytest.raises(ModelFileError, match=r"tokenizer\.json is corrupt"):
        load_tokenizer(files)


def test_no_decoder_is_left_to_the_library() -> None:
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    assert Tokenizer(backend).decode([0, 1]) == backend.decode([0, 1])


@pytest.mark.parametrize("encode", [WORDS.encode, WORDS.encode_within])
def test_others_run_while_a_long_text_is_tokenized(encode: Callable[[str], object]) -> None:
    """It does not hold the GIL, but for moments."""
    text = "the dog jumps over " * 20_000
    worker = threading.Thread(target=encode, args=(text,))
    turns = 0
    worker.start()  # returns once the thread runs, at the latest when it first lets go of the GIL
    while worker.is_alive():
        turns += 1
        worker.join(0)
    assert turns > 100


@pytest.mark.parametrize("make", [toy_tokenizers.byte_level, toy_tokenizers.sentencepiece])
@pytest.mark.parametrize("text", ["the dog", " the dog", "\nthe", ""])
def test_a_text_after_something_else_is_as_after_a_special_token(
    make: Callable[[], tokenizers.Tokenizer], text: str
) -> None:
    tokenizer = Tokenizer(make())
    ids = tokenizer.encode("</s>" + text, add_special_tokens=False)
    assert tokenizer.backend.id_to_token(ids[0]) == "</s>"
    assert tokenizer.encode_after(text) == ids[1:]


@pytest.mark.parametrize(("modules", "lowered"), [(True, True), (False, False)])
def test_texts_are_lowered_where_a_sentence_transformer_asks_for_it(
    tmp_path: Path, modules: bool, lowered: bool
) -> None:
    """In front of the tokenizer's own rules; special tokens stay."""
    toy_tokenizers.sentencepiece().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "sentence_bert_config.json").write_text('{"max_seq_length": 8, "do_lower_case": true}')
    if modules:
        (tmp_path / "modules.json").write_text("[]")
    loaded = load_tokenizer(ModelFiles(name="m", path=tmp_path, format="safetensors", weights=(), config={}))
    assert (loaded.encode("Hello </s>") == PIECES.encode("hello </s>")) is lowered
    assert loaded.encode("hello </s>") == PIECES.encode("hello </s>")
