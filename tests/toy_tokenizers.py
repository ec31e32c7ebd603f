"""Small tokenizers for tests, of the kinds that checkpoints have."""

from __future__ import annotations

import json
import string
from functools import cache

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE, Unigram, WordPiece
from tokenizers.processors import TemplateProcessing
from tokenizers.trainers import BpeTrainer, UnigramTrainer

TEXT = [
    "The quick brown fox jumps over the lazy dog, and the dog does not mind.",
    "A token is a piece of a word; words are pieces of a sentence.  Two spaces.",
    "Grüße aus München! Ça va? 日本語のテキスト、中文文本。 Привет, мир. 🙂🙃 naïve café",
    "def f(x):\n    return x + 1\n\nprint(f(41))",
] * 4
SPECIAL = ["<unk>", "<s>", "</s>"]
SPACE = "\N{LOWER ONE EIGHTH BLOCK}"


def byte_level(merges: int = 200) -> Tokenizer:
    """GPT-2's kind: any byte is a token, so characters may be cut. Ids 0 to 2 are special; `<tool>` is a plain mark."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    size = len(SPECIAL) + len(alphabet) + merges
    trainer = BpeTrainer(
        vocab_size=size, special_tokens=SPECIAL, initial_alphabet=sorted(alphabet), show_progress=False
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    marks = [AddedToken("<tool>", special=False, normalized=False), AddedToken("two words", special=False)]
    tokenizer.add_tokens(marks)
    return tokenizer


def sentencepiece(*, prefix: bool = True, bos: bool = True) -> Tokenizer:
    """Llama 2's kind: spaces are part of pieces, unknown characters become byte tokens <0x00> to <0xFF>."""
    vocabulary = {token: number for number, token in enumerate([*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256))])}
    trained = _trained_pieces()
    for token in trained[0]:
        vocabulary.setdefault(token, len(vocabulary))
    model = BPE(vocab=vocabulary, merges=trained[1], unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(model)
    replace = normalizers.Replace(" ", SPACE)
    undo = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), replace]) if prefix else replace
    tokenizer.decoder = decoders.Sequence([*undo, decoders.Strip(" ", 1, 0)] if prefix else undo)
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in SPECIAL])
    if bos:
        tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


def word_piece() -> Tokenizer:
    """BERT's kind, whose text is not the concatenation of its tokens."""
    words = ["[UNK]", *string.ascii_lowercase, *("##" + letter for letter in string.ascii_lowercase), ".", ","]
    tokenizer = Tokenizer(WordPiece({word: number for number, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer


def bert() -> Tokenizer:
    """`word_piece` with BERT's marks around one text or two, which its types tell apart. 57 tokens."""
    tokenizer = word_piece()
    marks = ["[CLS]", "[SEP]"]
    tokenizer.add_special_tokens([AddedToken(mark, normalized=False, special=True) for mark in marks])
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[(mark, tokenizer.token_to_id(mark)) for mark in marks],
    )
    return tokenizer


def unigram() -> Tokenizer:
    """XLM-RoBERTa's kind: the most likely pieces of a text, with marks around one text or two."""
    tokenizer = Tokenizer(Unigram(list(_trained_unigrams()), unk_id=0))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement=SPACE, prepend_scheme="always")
    tokenizer.decoder = decoders.Metaspace(replacement=SPACE, prepend_scheme="always")
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in SPECIAL])
    tokenizer.post_processor = TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> </s> $B:1 </s>:1", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    return tokenizer


@cache
def _trained_unigrams() -> tuple[tuple[str, float], ...]:
    """Pieces and scores, which SentencePiece keeps in float32. No two trainings are quite the same."""
    tokenizer = Tokenizer(Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement=SPACE, prepend_scheme="always")
    trainer = UnigramTrainer(vocab_size=200, special_tokens=SPECIAL, unk_token="<unk>", show_progress=False)
    tokenizer.train_from_iterator(TEXT, trainer)
    vocabulary = json.loads(tokenizer.to_str())["model"]["vocab"]
    return tuple((token, round(score * 1024) / 1024) for token, score in vocabulary)


def _trained_pieces() -> tuple[list[str], list[tuple[str, str]]]:
    """Tokens and merges, learned from ASCII only, so that other characters need bytes."""
    tokenizer = Tokenizer(BPE(unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)])
    trainer = BpeTrainer(vocab_size=300, special_tokens=["<unk>"], show_progress=False)
    tokenizer.train_from_iterator(["".join(c for c in text if ord(c) < 128) for text in TEXT], trainer)
    model = json.loads(tokenizer.to_str())["model"]
    tokens = [token for token, _ in sorted(model["vocab"].items(), key=lambda item: item[1]) if token != "<unk>"]
    return tokens, [tuple(merge) for merge in model["merges"]]
