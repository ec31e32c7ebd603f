from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

import pytest

from octavo.bench.samples import PromptSource, custom, prefix_repetition, random_samples, sharegpt
from octavo.cli.bench.data import make_samples
from octavo.core.errors import ConfigError


class Words:
    """A tokenizer of one token a word."""

    vocab_size = 50_000

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [len(word) for word in text.split()]

    def decode(self, ids: list[int], *, skip_special_tokens: bool = True) -> str:
        return " ".join(f"w{i}" for i in ids)


def source(*, as_text: bool = False, tokenizer: bool = True) -> PromptSource:
    return PromptSource(random.Random(0), Words() if tokenizer else None, as_text=as_text)


def test_random_lengths_are_exact_without_a_range() -> None:
    samples = random_samples(source(), 5, input_len=20, output_len=7, prefix_len=4)
    assert [(len(s.prompt), s.prompt_tokens, s.output_tokens) for s in samples] == [(24, 24, 7)] * 5
    assert len({tuple(s.prompt[:4]) for s in samples}) == 1
    assert len({tuple(s.prompt[4:]) for s in samples}) == 5


def test_random_lengths_stay_in_their_range() -> None:
    samples = random_samples(source(), 200, input_len=100, output_len=10, range_ratio=0.5)
    assert {len(s.prompt) for s in samples} <= set(range(50, 151))
    assert min(len(s.prompt) for s in samples) < 75 < 125 < max(len(s.prompt) for s in samples)
    assert {s.output_tokens for s in samples} <= set(range(5, 16))


def test_the_same_seed_gives_the_same_requests() -> None:
    assert random_samples(source(), 3, input_len=9, output_len=2) == random_samples(
        source(), 3, input_len=9, output_len=2
    )


@pytest.mark.parametrize("tokenizer", [True, False])
def test_text_prompts_hold_one_word_for_each_token(tokenizer: bool) -> None:
    [sample] = random_samples(source(as_text=True, tokenizer=tokenizer), 1, input_len=30, output_len=2)
    assert isinstance(sample.prompt, str)
    assert len(sample.prompt.split()) == 30


def test_prefixes_repeat_evenly() -> None:
    samples = prefix_repetition(source(), 12, num_prefixes=3, prefix_len=8, suffix_len=4, output_len=2)
    prefixes = [tuple(s.prompt[:8]) for s in samples]
    assert sorted(prefixes.count(p) for p in set(prefixes)) == [4, 4, 4]
    assert len({tuple(s.prompt[8:]) for s in samples}) == 12


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "data"
    path.write_text(text, encoding="utf-8")
    return path


def test_sharegpt_takes_the_first_exchange_and_drops_what_is_too_short(tmp_path: Path) -> None:
    conversations = [
        {"conversations": [{"from": "human", "value": "one two three four"}, {"from": "gpt", "value": "a b c d e f"}]},
        {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello there my old friend"}]},
        {"conversations": [{"from": "human", "value": "a question without an answer"}]},
        {"conversations": None},
    ]
    path = write(tmp_path, json.dumps(conversations))
    samples = sharegpt(source(), 3, path)
    assert {(s.prompt, s.prompt_tokens, s.output_tokens) for s in samples} == {("one two three four", 4, 6)}
    assert len(samples) == 3
    assert sharegpt(source(), 1, path, output_len=99)[0].output_tokens == 99


def test_custom_lines(tmp_path: Path) -> None:
    path = write(tmp_path, '{"prompt": "a b c", "output_tokens": 5}\n\n{"prompt": "d", "output_tokens": 6}\n')
    assert [(s.prompt, s.prompt_tokens, s.output_tokens) for s in custom(source(), 3, path)] == [
        ("a b c", 3, 5),
        ("d", 1, 6),
        ("a b c", 3, 5),
    ]


@pytest.mark.parametrize("line", ["{", '{"text": "a"}', '{"prompt": "a"}', "[1]"])
def test_a_wrong_custom_line_is_named(tmp_path: Path, line: str) -> None:
    path = write(tmp_path, '{"prompt": "fine", "output_tokens": 1}\n' + line)
    with pytest.raises(ConfigError, match=r"data:2 must be JSON"):
        custom(source(), 2, path)


def test_unreadable_data_sets_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.json: No such file"):
        sharegpt(source(), 1, tmp_path / "none.json")
    with pytest.raises(ConfigError, match="can't be read"):
        sharegpt(source(), 1, write(tmp_path, "{"))
    with pytest.raises(ConfigError, match="must hold a JSON list"):
        sharegpt(source(), 1, write(tmp_path, "{}"))
    with pytest.raises(ConfigError, match="no usable prompt"):
        sharegpt(source(), 1, write(tmp_path, "[]"))


def test_a_data_set_that_would_not_be_read_is_told() -> None:
    args = argparse.Namespace(dataset_name="random", dataset_path=Path("answers.json"))
    with pytest.raises(ConfigError, match="--dataset-name sharegpt or custom or timed_trace"):
        make_samples(args, tokenizer=None, vocab_size=100, as_text=False, seed=0)
