"""Pre-tokenizers for byte-level BPE, by their names in GGUF files (`tokenizer.ggml.pre`).

A file contains only the name; the rules are those of the tokenizers that the models were trained with.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tokenizers import Regex, normalizers, pre_tokenizers

_ENGLISH = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORD = r"|[^\r\n\p{L}\p{N}]?\p{L}+"
_LINES = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*" + _LINES
_LLAMA3 = _ENGLISH + _WORD + r"|\p{N}{1,3}" + _REST
_QWEN2 = _ENGLISH + _WORD + r"|\p{N}" + _REST
_QWEN35 = _ENGLISH + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*" + _LINES
_SEED = _ENGLISH + _WORD + r"|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+" + _LINES
_BAILING = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
_EXAONE_MOE = (
    _ENGLISH
    + r"|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
)
_SPACES = "".join(rf"|\s{{{count}}}(?!\S)" for count in (512, 256, 128, 64, 32, 16, 8, 4))
_JAIS2 = _ENGLISH + _WORD + r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+" + _SPACES + r"|\s{1,2}(?!\S)|\s{1}"


def _cased(suffix: str, digits: str) -> str:
    """Return rules that also cut where a capital follows a small letter."""
    upper, lower = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
    start = r"[^\r\n\p{L}\p{N}]?"
    words = f"{start}{upper}*{lower}+{suffix}|{start}{upper}+{lower}*{suffix}"
    return f"{words}|{digits}| ?[^\\s\\p{{L}}\\p{{N}}]+[\\r\\n/]*{_LINES}"


_TEKKEN = _cased("", r"\p{N}")
_GPT4O = _cased(f"{_ENGLISH}?", r"\p{N}{1,3}")
_ASIAN = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_DEEPSEEK3 = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"| ?[\p{P}\p{S}]+[\r\n]*" + _LINES
)
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+", r"\p{N}")
_BLOOM = " ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """A set of rules.

    Attributes:
        build: creates the splitter.
        normalizer: creates the text normalizer, if there is one.
        ignore_merges: a word that is a token is encoded as that token, without applying merges.
        add_bos, add_sep: whether prompts begin with the beginning-of-sequence token, and end with the separator,
            unless the file specifies it.
    """

    build: Callable[[], pre_tokenizers.PreTokenizer]
    normalizer: Callable[[], normalizers.Normalizer] | None = None
    ignore_merges: bool = False
    add_bos: bool = False
    add_sep: bool = False


def _gpt2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False)


def _single_digits() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


def _falcon() -> pre_tokenizers.PreTokenizer:
    threes = pre_tokenizers.Split(Regex("[0-9][0-9][0-9]"), behavior="isolated")
    return pre_tokenizers.Sequence(
        [pre_tokenizers.Punctuation("contiguous"), _gpt2(), pre_tokenizers.Digits(individual_digits=False), threes]
    )


def _by_patterns(*patterns: str) -> Callable[[], pre_tokenizers.PreTokenizer]:
    """Return a splitter by one pattern after the other, each within the pieces of those before."""

    def build() -> pre_tokenizers.PreTokenizer:
        splits = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in patterns]
        return pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])

    return build


_PLAIN = PreTokenizer(_gpt2)
_PLAIN_NFC = PreTokenizer(_gpt2, normalizers.NFC)
_PLAIN_SEP = PreTokenizer(_gpt2, add_sep=True)
_DIGITS = PreTokenizer(_single_digits)
_DIGITS_NFC = PreTokenizer(_single_digits, normalizers.NFC)
_LLAMA = PreTokenizer(_by_patterns(_LLAMA3), ignore_merges=True, add_bos=True)
_GPT4 = PreTokenizer(_by_patterns(_LLAMA3))
_GLM = PreTokenizer(_by_patterns(_LLAMA3), ignore_merges=True)
_QWEN = PreTokenizer(_by_patterns(_QWEN2), normalizers.NFC)
_QWEN_RULES = PreTokenizer(_by_patterns(_QWEN2))
_O200K = PreTokenizer(_by_patterns(_GPT4O))
_DEEPSEEK = PreTokenizer(_by_patterns(r"\p{N}{1,3}", _ASIAN, _DEEPSEEK3))
_WORDS = PreTokenizer(_by_patterns(_BLOOM))
_LING = PreTokenizer(_by_patterns(_BAILING))

PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    "default": _PLAIN,
    **dict.fromkeys(("gpt-2", "phi-2", "jina-es", "jina-de", "jina-v2-es", "jina-v2-de", "gigachat"), _PLAIN),
    **dict.fromkeys(("a.x-4.0", "mellum", "exaone4", "jais", "trillion", "granite-docling"), _PLAIN),
    **dict.fromkeys(("mpt", "olmo", "modern-bert"), _PLAIN_NFC),
    **dict.fromkeys(("roberta-bpe", "jina-v1-en", "jina-v2-code"), _PLAIN_SEP),
    **dict.fromkeys(("smollm", "starcoder", "refact", "codeshell", "exaone", "minerva-7b", "mellum2"), _DIGITS),
    "command-r": _DIGITS_NFC,
    "falcon": PreTokenizer(_falcon),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0"), _LLAMA),
    **dict.fromkeys(("lfm2", "jina-v5-nano"), _LLAMA),
    **dict.fromkeys(("dbrx", "smaug-bpe", "chatglm-bpe"), _GPT4),
    **dict.fromkeys(("glm4", "glm5"), _GLM),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "kormo", "f2llmv2", "megrez", "stablelm2"), _QWEN),
    **dict.fromkeys(("hunyuan", "solar-open", "grok-2"), _QWEN_RULES),
    "qwen35": PreTokenizer(_by_patterns(_QWEN35), normalizers.NFC),
    "ufakzeka": PreTokenizer(_by_patterns(_QWEN2.removeprefix(_ENGLISH + "|"))),
    "laguna": PreTokenizer(_by_patterns(r"[^\n]+|[\n]+", _QWEN2)),
    "tekken": PreTokenizer(_by_patterns(_TEKKEN), ignore_merges=True, add_bos=True),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"), _O200K),
    "granite-embed-multi-97m": PreTokenizer(_by_patterns(_GPT4O), ignore_merges=True),
    **dict.fromkeys(("tiny_aya", "cohere2moe"), PreTokenizer(_by_patterns(r"\d{1,3}(?=(?:\d{3})*\b)", _GPT4O))),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4"), _DEEPSEEK),
    "deepseek-coder": PreTokenizer(_by_patterns(*_DEEPSEEK_CODER)),
    "seed-coder": PreTokenizer(_by_patterns(_SEED)),
    **dict.fromkeys(("bailingmoe", "bailingmoe2", "llada-moe"), _LING),
    "minicpm5": PreTokenizer(_by_patterns(r"\p{N}{1,3}", _LLAMA3.replace("{1,3}", "+")), ignore_merges=True),
    "exaone-moe": PreTokenizer(_by_patterns(_EXAONE_MOE)),
    "jais-2": PreTokenizer(_by_patterns(_JAIS2)),
    **dict.fromkeys(("bloom", "poro-chat", "gpt3-finnish"), _WORDS),
    "viking": PreTokenizer(_by_patterns(_BLOOM, r"\p{N}")),
}
"""Name -> rules. Not here: names of rules that are code of llama.cpp (kimi-k2, afmoe, superbpe), of BPE over pieces
(gemma4, sarvam-moe), and deepseek-llm, chameleon, youtu, spark2_5 and whitespace."""
