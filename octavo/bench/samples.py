"""Benchmark requests: prompts and output lengths, synthetic or read from a data set."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

from octavo.core.errors import ConfigError

T = TypeVar("T")

ASSUMED_VOCABULARY = range(1000, 30_000)
"""Ids that every current model's vocabulary has, for use without its tokenizer."""


class TextTokens(Protocol):
    """The part of a tokenizer that a bench uses."""

    @property
    def vocab_size(self) -> int: ...

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...

    def decode(self, ids: list[int], *, skip_special_tokens: bool = True) -> str: ...


@dataclass(frozen=True, slots=True)
class Sample:
    """One request. `prompt_tokens` is a count, or an estimate if no tokenizer is available.

    Attributes:
        fields: further fields of its body.
    """

    prompt: str | list[int]
    prompt_tokens: int
    output_tokens: int
    fields: Mapping[str, Any] = field(default_factory=dict)


class PromptSource:
    """Makes prompts of a given length, as ids or as text, and counts the tokens of given prompts."""

    def __init__(self, rng: random.Random, tokenizer: TextTokens | None, *, as_text: bool) -> None:
        self.rng = rng
        self.tokenizer = tokenizer
        self.as_text = as_text
        self.ids = range(1000, tokenizer.vocab_size - 1000) if tokenizer else ASSUMED_VOCABULARY
        if len(self.ids) < 1000 and tokenizer:
            self.ids = range(tokenizer.vocab_size)

    def prompt(self, ids: list[int]) -> str | list[int]:
        if not self.as_text:
            return ids
        if self.tokenizer:
            return self.tokenizer.decode(ids)
        return " ".join(WORDS[token % len(WORDS)] for token in ids)

    def draw(self, count: int) -> list[int]:
        return [self.rng.choice(self.ids) for _ in range(count)]

    def count(self, text: str) -> int:
        return len(self.tokenizer.encode(text)) if self.tokenizer else max(1, len(text) // 4)


# Short, common words, one token each in most vocabularies.
WORDS = (
    "the", "and", "for", "you", "not", "with", "this", "that", "from", "have", "are", "was", "but", "all", "can",
    "had", "her", "one", "our", "out", "day", "get", "has", "him", "his", "how", "man", "new", "now", "old",
    "see", "two",
)  # fmt: skip


def random_samples(
    source: PromptSource, count: int, *, input_len: int, output_len: int, range_ratio: float = 0.0, prefix_len: int = 0
) -> list[Sample]:
    """Return random prompts behind a common random prefix. Lengths vary by up to `range_ratio` either way."""

    def around(length: int) -> int:
        return max(1, source.rng.randint(round(length * (1 - range_ratio)), round(length * (1 + range_ratio))))

    prefix = source.draw(prefix_len)
    samples = []
    for _ in range(count):
        ids = prefix + source.draw(around(input_len))
        samples.append(Sample(source.prompt(ids), len(ids), around(output_len)))
    return samples


def prefix_repetition(
    source: PromptSource, count: int, *, num_prefixes: int, prefix_len: int, suffix_len: int, output_len: int
) -> list[Sample]:
    """Return requests with `num_prefixes` random prefixes, each shared by an equal number of requests, shuffled."""
    prefixes = [source.draw(prefix_len) for _ in range(num_prefixes)]
    samples = []
    for at in range(count):
        ids = prefixes[at % num_prefixes] + source.draw(suffix_len)
        samples.append(Sample(source.prompt(ids), len(ids), output_len))
    source.rng.shuffle(samples)
    return samples


def sharegpt(source: PromptSource, count: int, path: Path, *, output_len: int | None = None) -> list[Sample]:
    """Return the first question of each conversation in a ShareGPT JSON file; output lengths are the first answers'."""
    pairs = [turns[:2] for turns in map(_turns, _load_json(path)) if len(turns) >= 2]
    source.rng.shuffle(pairs)
    samples = (
        Sample(question, source.count(question), output_len or source.count(answer)) for question, answer in pairs
    )
    fit = [s for s in samples if 4 <= s.prompt_tokens <= 1024 and s.output_tokens >= 4 and _total(s) <= 2048]
    return _repeat(fit, count, path)


def custom(source: PromptSource, count: int, path: Path, *, output_len: int | None = None) -> list[Sample]:
    """Read lines of JSON with `prompt` and, unless `output_len` is given, `output_tokens`."""
    samples = []
    for number, line in _lines(path):
        try:
            entry = json.loads(line)
            prompt = str(entry["prompt"])
            length = output_len or int(entry["output_tokens"])
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f'{path}:{number} must be JSON such as {{"prompt": "...", "output_tokens": 128}} '
                f"(or give --custom-output-len): {error!r}"
            ) from error
        samples.append(Sample(prompt, source.count(prompt), length))
    return _repeat(samples, count, path)


def _turns(entry: Any) -> list[str]:
    turns = entry.get("conversations") or entry.get("conversation") if isinstance(entry, dict) else None
    return [str(turn.get("value", "")) for turn in turns or () if isinstance(turn, dict)]


def _total(sample: Sample) -> int:
    return sample.prompt_tokens + sample.output_tokens


def _load_json(path: Path) -> list[Any]:
    content = _read(path, json.loads)
    if not isinstance(content, list):
        raise ConfigError(f"{path} must hold a JSON list of conversations")
    return content


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    text = _read(path, str)
    return ((number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip())


def _read(path: Path, parse: Callable[[str], T]) -> T:
    try:
        return parse(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--dataset-path {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise ConfigError(f"--dataset-path {path} can't be read: {error}") from error


def _repeat(samples: list[Sample], count: int, path: Path) -> list[Sample]:
    """Return exactly `count` samples, repeating the data set if it is too short."""
    if not samples:
        raise ConfigError(f"--dataset-path {path} holds no usable prompt")
    return [samples[at % len(samples)] for at in range(count)]
