"""Prompts that a head is trained on: those of a user's file, and those that the model writes itself."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.core.errors import ConfigError, InvalidRequestError
from octavo.text.prompts.prompt import TokensPrompt

if TYPE_CHECKING:
    from octavo import LLM

OnProgress = Callable[[str, int, int], None]
"""Called with a phase, and how much of it is done, of how much."""

_MARK = "HERE-IS-THE-PROMPT"
_MOST_TOKENS = 96
"""Of a written prompt; longer ones are dropped, since they break off."""
_ROUNDS = 8
"""Most attempts to get as many different prompts as are wanted."""


def read_prompts(path: Path) -> list[Any]:
    """Return the prompts of a file: one a line, as JSON with `messages` or `prompt`, or as plain text.

    Raises:
        ConfigError: the file can't be read, or has fewer than two prompts.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")  # other line ends may be in the strings of JSON
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--data {path}: {error}. Give a file in UTF-8 with a prompt on each line.") from error
    prompts = [_prompt(line.strip(), number, path) for number, line in enumerate(lines, 1) if line.strip()]
    if len(prompts) < 2:
        raise ConfigError(
            f"--data {path} has {len(prompts)} prompts; at least 2 are needed, one to train and one to test."
        )
    return prompts


def _prompt(line: str, number: int, path: Path) -> Any:
    if not line.startswith("{"):
        return as_message(line)
    try:
        found = json.loads(line)
    except json.JSONDecodeError as error:
        raise ConfigError(f"--data {path}, line {number} is not valid JSON: {error}.") from error
    for key, kind in (("messages", list), ("prompt", str)):
        if isinstance(found.get(key), kind) and found[key]:
            return found[key]
    raise ConfigError(
        f"--data {path}, line {number} has neither messages (a list) nor prompt (a text), or it is empty."
    )


def as_message(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def write_prompts(llm: LLM, count: int, *, context: int, seed: int, progress: OnProgress) -> list[str]:
    """Let a chat model write different prompts, by having it continue its template where the user's text begins.

    After Xu et al. 2024, Magpie (https://arxiv.org/abs/2406.08464). Tokens are drawn at temperature 1.

    Args:
        count: prompts wanted; fewer are returned if the model repeats itself.
        context: most tokens of a prompt and its answer.
        seed: of the first prompt; the others have the following ones.

    Raises:
        ConfigError: the model has no chat template, or it writes fewer than two prompts.
    """
    before, end = _around_prompt(llm)
    longest = max(1, min(_MOST_TOKENS, context // 2 - len(before)))
    found: dict[str, None] = {}
    tried = 0
    for _ in range(_ROUNDS):
        asked = count - len(found)
        asked += asked // 8
        texts = _continued(llm, before, end, longest, range(seed + tried, seed + tried + asked))
        tried += asked
        known = len(found)
        found |= dict.fromkeys(texts)
        progress("written prompts", min(len(found), count), count)
        if len(found) >= count or len(found) - known < asked // 8:
            break
    if len(found) < 2:
        raise ConfigError(
            f"--write-prompts {count}: the model wrote {len(found)} prompts in {tried} attempts. Use --data."
        )
    return list(found)[:count]


def _around_prompt(llm: LLM) -> tuple[list[int], str]:
    """Return the tokens of the chat template before the user's text, and the text that ends it."""
    tokenizer = llm.get_tokenizer()
    try:
        text = tokenizer.apply_chat_template(as_message(_MARK), tokenize=False, add_generation_prompt=True)
    except InvalidRequestError as error:
        raise ConfigError(f"--write-prompts: the model can't begin a chat: {error} Use --data.") from error
    before, _, after = str(text).partition(_MARK)
    return tokenizer.encode(before.rstrip(" "), add_special_tokens=False), after.strip()


def _continued(llm: LLM, before: list[int], end: str, longest: int, seeds: range) -> list[str]:
    """Return the continuations of `before` that are complete within `longest` tokens."""
    from octavo import SamplingParams

    tokenizer = llm.get_tokenizer()
    first = tokenizer.encode(end, add_special_tokens=False)[:1]
    special = bool(first) and first[0] in tokenizer.special_ids
    params = [
        SamplingParams(
            max_tokens=longest,
            temperature=1,
            seed=one,
            stop_token_ids=first if special else None,
            stop=[end] if end and not special else None,
        )
        for one in seeds
    ]
    outputs = llm.generate([TokensPrompt(prompt_token_ids=before)] * len(params), params, use_tqdm=False)
    whole = [one.outputs[0] for one in outputs if one.outputs[0].finish_reason == "stop"]
    return [text for one in whole if (text := one.text.strip())]
