"""Token ids for requests whose lengths and block numbers are all that is known.

Requests with the same numbers get the same tokens, so that they share KV blocks as the recorded ones did.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count

from octavo.bench.traces import Arrival

END = -2
"""The token that ends answers which end by themselves. No block has it."""
_OWN = 1 << 60
"""Ids from here on are of blocks that no other request has. Numbers in traces are smaller."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a request generates.

    Attributes:
        ids: the token id of each block of prompt and answer.
        last: position of the last token.
        stops: it is `END`.
    """

    ids: list[int]
    block_size: int
    last: int
    stops: bool

    def token(self, position: int) -> int:
        """Return the token at a position of the sequence. Beyond the last one, it is never read."""
        if position >= self.last and self.stops:
            return END
        return self.ids[min(position // self.block_size, len(self.ids) - 1)]


class TokenMaker:
    """Makes the tokens of a simulation's requests."""

    def __init__(self) -> None:
        self._own = count(_OWN)

    def make(self, arrival: Arrival) -> tuple[list[int], Answer]:
        """Return a request's prompt and answer."""
        size, end = arrival.block_size, arrival.prompt_tokens + arrival.output_tokens
        ids = arrival.sequence()
        ids = ids[: -(-end // size)]
        ids += [next(self._own) for _ in range(-(-end // size) - len(ids))]
        prompt = [one for one in ids[: -(-arrival.prompt_tokens // size)] for _ in range(size)]
        return prompt[: arrival.prompt_tokens], Answer(ids, size, end - 1, arrival.stops)
