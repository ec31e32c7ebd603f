"""Judge a model: perplexity of a text, its divergence from another model, and questions with given answers."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.core.errors import ConfigError
from octavo.core.params import SamplingParams
from octavo.python_api.llm import LLM

TOP = 64
"""Tokens whose log-probabilities a divergence compares one by one."""
_TEXT = Path(__file__).with_name("evaluation.txt")

Distribution = Mapping[int, float]
"""Token -> log-probability, for the likeliest tokens and the one that follows."""


@dataclass(frozen=True, slots=True)
class Reading:
    """What a model expected at each token of a text but the first of each context.

    Attributes:
        tokens: the tokens that followed.
        expected: the distribution of each.
    """

    tokens: tuple[int, ...]
    expected: tuple[Distribution, ...]

    @property
    def perplexity(self) -> float:
        """exp of the mean negative log-probability."""
        total = sum(one[token] for token, one in zip(self.tokens, self.expected, strict=True))
        return math.exp(-total / len(self.tokens))

    def divergence(self, reference: Reading) -> float:
        """Return a lower bound of the mean Kullback-Leibler divergence from a reference, in nats per token.

        Each distribution is compared over the tokens that both list, and the sum of all others.

        Raises:
            ConfigError: the two read different tokens.
        """
        if self.tokens != reference.tokens:
            raise ConfigError(
                "The two models divide the text into different tokens, so their distributions can't be compared. Give "
                "models with the same tokenizer."
            )
        pairs = zip(reference.expected, self.expected, strict=True)
        return sum(_divergence(theirs, own) for theirs, own in pairs) / len(self.tokens)

    def agreement(self, reference: Reading) -> float:
        """Return the fraction of tokens for which both models find the same one likeliest."""
        pairs = zip(reference.expected, self.expected, strict=True)
        return sum(max(theirs, key=theirs.__getitem__) == max(own, key=own.__getitem__) for theirs, own in pairs) / len(
            self.tokens
        )


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt, the texts that may continue it, and the number of the right one."""

    prompt: str
    choices: tuple[str, ...]
    answer: int


def read(llm: LLM, text: str, context: int = 1024, limit: int | None = None) -> Reading:
    """Let a model read a text, in contexts of this many tokens. The model needs `max_logprobs` of at least `TOP`.

    Args:
        limit: most tokens of the text; None for all.

    Raises:
        ConfigError: the text has fewer than two tokens.
    """
    ids = llm.get_tokenizer().encode(text)[:limit]
    context = min(context, llm.info.max_model_len - 1)
    parts = [ids[first : first + context] for first in range(0, len(ids), context)]
    parts = [part for part in parts if len(part) > 1]
    if not parts:
        raise ConfigError("The text has fewer than two tokens. Give a longer one.")
    found = [one for distributions in _expected(llm, parts) for one in distributions[1:]]
    return Reading(tuple(token for part in parts for token in part[1:]), tuple(found))


def accuracy(llm: LLM, questions: Sequence[Question]) -> float:
    """Return the fraction of questions whose right answer has the highest log-probability per character."""
    encode = llm.get_tokenizer().encode
    prompts = [list(encode(one.prompt + choice)) for one in questions for choice in one.choices]
    shared = [_common(encode(one.prompt), encode(one.prompt + choice)) for one in questions for choice in one.choices]
    scores = [
        sum(one[token] for token, one in list(zip(ids, distributions, strict=True))[first:])
        for ids, distributions, first in zip(prompts, _expected(llm, prompts), shared, strict=True)
    ]
    right, at = 0, 0
    for question in questions:
        each = [score / len(choice) for score, choice in zip(scores[at:], question.choices, strict=False)]
        right += each.index(max(each)) == question.answer
        at += len(question.choices)
    return right / len(questions)


def bundled_text() -> str:
    """Return the text that is used if none is given: some 1,100 words of plain English."""
    return _TEXT.read_text(encoding="utf-8")


def questions_in(path: Path) -> list[Question]:
    """Read questions, one JSON object a line: {"prompt": ..., "choices": [...], "answer": number of the right one}.

    Raises:
        ConfigError: the file can't be read, or a line is no such object; the text names the line.
    """
    questions = []
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--choices {path} can't be read as UTF-8: {error}. Give a file of questions.") from error
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            questions.append(_question(line, f"{path}, line {number}"))
    if not questions:
        raise ConfigError(f"{path} has no questions. Write one JSON object a line: prompt, choices, answer.")
    return questions


def _question(line: str, where: str) -> Question:
    try:
        given = json.loads(line)
        prompt, choices, answer = given["prompt"], given["choices"], given["answer"]
        valid = (
            isinstance(prompt, str)
            and isinstance(choices, list)
            and len(choices) > 1
            and all(isinstance(choice, str) and choice for choice in choices)
            and type(answer) is int
            and 0 <= answer < len(choices)
        )
    except (ValueError, KeyError, TypeError):
        valid = False
    if not valid:
        raise ConfigError(
            f"{where}: a question has a prompt (text), choices (at least two texts) and an answer (the number of the "
            "right choice, from 0)."
        )
    return Question(prompt, tuple(choices), answer)


def _expected(llm: LLM, prompts: Sequence[Sequence[int]]) -> list[list[Distribution]]:
    """Return each prompt's distributions; that of its first token is empty."""
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=TOP, detokenize=False)
    given: list[Any] = [{"prompt_token_ids": list(ids)} for ids in prompts]
    outputs = llm.generate(given, params, use_tqdm=False)
    found: list[list[Distribution]] = []
    for output in outputs:
        each = output.prompt_logprobs
        assert each is not None
        found.append([{token: one.logprob for token, one in (place or {}).items()} for place in each])
    return found


def _common(first: Sequence[int], second: Sequence[int]) -> int:
    """Return the number of tokens that two texts begin with in common, at least 1: nothing predicts the first."""
    count = next((i for i, pair in enumerate(zip(first, second, strict=False)) if pair[0] != pair[1]), len(first))
    return max(1, min(count, len(second) - 1))


def _divergence(reference: Distribution, own: Distribution) -> float:
    both = reference.keys() & own.keys()
    total = sum(math.exp(reference[token]) * (reference[token] - own[token]) for token in both)
    rest, own_rest = (1 - sum(math.exp(one[token]) for token in both) for one in (reference, own))
    least = 1e-9  # of a remainder that rounding would make zero or negative
    return total + max(rest, 0.0) * math.log(max(rest, least) / max(own_rest, least))
