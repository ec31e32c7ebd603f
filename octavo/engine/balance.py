"""`Balance`: chooses a replica for each request, by load and by what the replicas' KV caches probably hold."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterator

from octavo.core.request import GenerateRequest

_CHUNK = 64
_MOST_CHUNKS = 64
_REMEMBERED = 1 << 16
_USUAL_OUTPUT = 256
"""Tokens that a request is expected to generate at most, since few reach their `max_tokens`."""


class Balance:
    """Counts, for each replica, the tokens of its open requests, and remembers the beginnings of recent prompts."""

    def __init__(self, replicas: int) -> None:
        self.loads = [0] * replicas
        self._seen: OrderedDict[int, int] = OrderedDict()
        """Digest of a prompt's beginning -> bits of the replicas that computed it, the most recent last."""

    def take(self, request: GenerateRequest, alive: Collection[int]) -> tuple[int, int]:
        """Choose a replica for a request and count it there: the one with the least load, less the tokens of the prompt
        that its cache probably holds.

        Returns:
            The replica, and the tokens to `give_back` when the request ends.
        """
        digests = list(_digests(request))
        known = {one: self._known(digests, one) for one in alive}
        chosen = min(alive, key=lambda one: (self.loads[one] - known[one], self.loads[one], one))
        for digest in digests:
            self._seen[digest] = self._seen.pop(digest, 0) | 1 << chosen
        while len(self._seen) > _REMEMBERED:
            self._seen.popitem(last=False)
        expected = min(request.params.max_tokens or _USUAL_OUTPUT, _USUAL_OUTPUT) * request.params.n
        cost = len(request.tokens) - known[chosen] + expected
        self.loads[chosen] += cost
        return chosen, cost

    def give_back(self, replica: int, cost: int) -> None:
        """A request has ended."""
        self.loads[replica] -= cost

    def forget(self, replica: int) -> None:
        """The replica's cache is empty."""
        for digest in self._seen:
            self._seen[digest] &= ~(1 << replica)

    def _known(self, digests: list[int], replica: int) -> int:
        """Return the tokens at the prompt's beginning that the replica has computed before."""
        count = 0
        for digest in digests:
            if not self._seen.get(digest, 0) >> replica & 1:
                break
            count += _CHUNK
        return count


def _digests(request: GenerateRequest) -> Iterator[int]:
    """Yield a digest for the prompt's first 64 tokens, its first 128, and so on."""
    digest = hash((request.namespace, tuple(request.keys)))
    for begin in range(0, min(len(request.tokens), _MOST_CHUNKS * _CHUNK) - _CHUNK + 1, _CHUNK):
        digest = hash((digest, tuple(request.tokens[begin : begin + _CHUNK])))
        yield digest
