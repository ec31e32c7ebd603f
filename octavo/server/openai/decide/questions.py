"""Conversion of a question to a prompt whose next token decides, and of its probabilities to an answer."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Sequence
from string import ascii_lowercase, ascii_uppercase
from typing import Any

from octavo.core.errors import InvalidRequestError
from octavo.core.params import MAX_LOGPROB_TOKENS
from octavo.server.openai.decide.protocol import (
    Answer,
    ChoiceAnswer,
    ChoiceProbability,
    ChoiceQuestion,
    LevelProbability,
    PredicateAnswer,
    PredicateQuestion,
    Question,
    ScoreAnswer,
    Turn,
)
from octavo.server.openai.next_token import shares_of
from octavo.text.tokenizers.tokenizer import Tokenizer

_NAMES = (*ascii_uppercase, *ascii_lowercase, *map("".join, itertools.product(ascii_uppercase, repeat=2)))
"""Names for options, simplest first."""


def options_of(question: Question) -> list[str]:
    """Return the possible answers of a question as texts."""
    if isinstance(question, PredicateQuestion):
        return ["true", "false"]
    if isinstance(question, ChoiceQuestion):
        named = [(_said(one.value), one.description) for one in question.choices]
    else:
        named = [(one.label, one.description) for one in question.levels]
    return [f"{name}: {description}" if description else name for name, description in named]


def _said(value: str | bool) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def labels_for(count: int, tokenizer: Tokenizer, param: str) -> dict[str, int]:
    """Return `count` option names with their tokens, all different.

    Raises:
        InvalidRequestError: the tokenizer has fewer names that are a single token.
    """
    found: dict[str, int] = {}
    for name in _NAMES:
        tokens = tokenizer.encode(name, add_special_tokens=False)
        if len(tokens) == 1 and tokens[0] not in found.values():
            found[name] = tokens[0]
        if len(found) == min(count, MAX_LOGPROB_TOKENS):
            break
    if len(found) < count:
        raise InvalidRequestError(
            f"{param} must have at most {len(found)} entries with this model, got {count}.", param=param, value=count
        )
    return found


def conversation(turns: Sequence[Turn], question: Question, names: Sequence[str]) -> list[dict[str, Any]]:
    """Return messages whose expected reply is the name of one option."""
    options = (f"{name}. {option}" for name, option in zip(names, options_of(question), strict=True))
    asked = "\n".join(
        (question.instructions, "", *options, "", "Reply with the letter of one option and nothing else.")
    )
    messages = [
        {"role": "system" if turn.role == "developer" else turn.role, "content": turn.content} for turn in turns
    ]
    if messages and messages[-1]["role"] == "user":
        messages[-1]["content"] += f"\n\n{asked}"
    else:
        messages.append({"role": "user", "content": asked})
    return messages


def answer_to(question: Question, logprobs: Sequence[float]) -> Answer:
    """Return the answer for the log-probabilities of the options' names among all tokens."""
    shares = shares_of(logprobs)
    best, confidence = shares.index(max(shares)), math.exp(max(logprobs))
    if isinstance(question, PredicateQuestion):
        return PredicateAnswer(name=question.name, probability=shares[0])
    if isinstance(question, ChoiceQuestion):
        values = [one.value for one in question.choices]
        found = [ChoiceProbability(value, share) for value, share in zip(values, shares, strict=True)]
        return ChoiceAnswer(name=question.name, choice=values[best], probabilities=found, confidence=confidence)
    levels = [
        LevelProbability(value, level.label, share)
        for value, (level, share) in enumerate(zip(question.levels, shares, strict=True))
    ]
    expected = sum(one.value * one.probability for one in levels)
    return ScoreAnswer(name=question.name, score=expected, probabilities=levels, confidence=confidence)
