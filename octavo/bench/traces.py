"""Traces of requests: arrival times, lengths, and which prompts begin alike. `core/trace.py` describes their lines."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec

from octavo.bench.samples import PromptSource, Sample
from octavo.core.errors import ConfigError
from octavo.core.output import FinishReason
from octavo.core.trace import TraceLine

_decode = msgspec.json.Decoder(TraceLine).decode


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """One request of a trace.

    Attributes:
        at: seconds after the first one.
        prompt_tokens, output_tokens: lengths of the prompt and of each answer, at least 1.
        max_tokens: as asked; None if unknown, or for the rest of the context.
        stops: the answer ended by itself, before `max_tokens`.
        blocks: a number for each block of the prompt, of `block_size` tokens; prompts that begin with the same
            numbers begin alike. Blocks without a number are like no others.
        answer: numbers of the full blocks after the prompt's full ones.
    """

    at: float
    prompt_tokens: int
    output_tokens: int
    max_tokens: int | None = None
    stops: bool = False
    n: int = 1
    priority: int = 0
    blocks: Sequence[int] = ()
    answer: Sequence[int] = ()
    block_size: int = 1

    def sequence(self) -> list[int]:
        """Return the numbers of the blocks of prompt and answer, as far as known."""
        full = self.prompt_tokens // self.block_size
        return [*self.blocks[:full], *(self.answer or self.blocks[full:])]


def read_trace(path: Path, *, speed: float = 1.0, most: int | None = None) -> list[Arrival]:
    """Return the requests of a trace by arrival; without those that have no answer, since they were never computed.

    A last line that is cut off is left out: the file may end anywhere.

    Args:
        speed: factor by which requests arrive faster.
        most: requests to read, the first ones; None for all.

    Raises:
        ConfigError: the file can't be read, or is not a trace.
    """
    found = sorted((_arrival(line) for line in _lines(path) if line.output_length > 0), key=lambda one: one.at)
    if not found:
        raise ConfigError(f"{path} has no request with an answer; record one with octavo serve --record-traffic FILE.")
    first = found[0].at
    return [replace(one, at=(one.at - first) / speed) for one in islice(found, most)]


def _lines(path: Path) -> Iterator[TraceLine]:
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise ConfigError(f"{path} can't be read: {error.strerror or error}.") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            found = _decode(line)
            _check(found)
        except (msgspec.DecodeError, UnicodeDecodeError, ValueError) as error:
            if number == len(lines) and number > 1:
                return  # cut off
            raise ConfigError(
                f"{path}:{number} is not a line of a trace: {error}. Lines are JSON such as "
                '{"timestamp": 0, "input_length": 6758, "output_length": 500, "hash_ids": [0, 1, 2]}.'
            ) from error
        yield found


def _check(line: TraceLine) -> None:
    if line.input_length < 1 or line.output_length < 0 or line.block_size < 1 or line.n < 1:
        raise ValueError("input_length, block_size and n must be at least 1, output_length at least 0")


def _arrival(line: TraceLine) -> Arrival:
    return Arrival(
        at=line.timestamp / 1000,
        prompt_tokens=line.input_length,
        output_tokens=line.output_length,
        max_tokens=line.max_tokens,
        stops=line.finish != FinishReason.LENGTH,
        n=line.n,
        priority=line.priority,
        blocks=line.hash_ids,
        answer=line.answer_ids,
        block_size=line.block_size,
    )


def samples_of(arrivals: Sequence[Arrival], source: PromptSource) -> list[Sample]:
    """Return requests with random prompts of the same lengths that begin alike where those of the trace do. Each answer
    may have as many tokens as the trace's."""
    return [_sample(arrival, source) for arrival in arrivals]


def _sample(arrival: Arrival, source: PromptSource) -> Sample:
    ids: list[int] = []
    for number in arrival.sequence():
        if len(ids) >= arrival.prompt_tokens:
            break
        drawn = random.Random(number)
        ids += [drawn.choice(source.ids) for _ in range(arrival.block_size)]
    ids = ids[: arrival.prompt_tokens]
    ids += source.draw(arrival.prompt_tokens - len(ids))
    fields: dict[str, Any] = {"n": arrival.n, "temperature": 1.0} if arrival.n > 1 else {}
    if arrival.priority:
        fields["priority"] = arrival.priority
    return Sample(source.prompt(ids), len(ids), arrival.output_tokens, fields)
