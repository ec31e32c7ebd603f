"""Numbers that say which prompts begin alike, and nothing else about them."""

from __future__ import annotations

import os
from array import array
from collections.abc import Sequence
from hashlib import blake2b
from typing import cast

_BYTES = 6
"""Of a number. Numbers are compared only if the blocks before them are equal, so few suffice."""


class BlockHashes:
    """Hashes blocks of tokens, each with all before it.

    The key is random and is never written. Without it, a guessed prompt can't be hashed and looked for in the file.
    """

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._key = os.urandom(32)

    def of(self, namespace: str, keys: Sequence[int | bytes], num_prompt: int) -> tuple[list[int], list[int]]:
        """Return the numbers of the prompt's blocks, also of a last one that is partly filled, and those of full blocks
        after its full ones.

        Args:
            namespace: sequences of others never have the same numbers.
            keys: what identifies the tokens of prompt and answer, as in `Request.keys`.
        """
        size = self.block_size
        before = blake2b(namespace.encode(), digest_size=16, key=self._key).digest()
        prompt: list[int] = []
        answer: list[int] = []
        for start in range(0, len(keys), size):
            end = start + size
            if start < num_prompt < end:
                prompt.append(_number(self._after(before, keys[start:num_prompt])))
            if end > len(keys):
                break
            before = self._after(before, keys[start:end])
            (prompt if end <= num_prompt else answer).append(_number(before))
        return prompt, answer

    def _after(self, before: bytes, keys: Sequence[int | bytes]) -> bytes:
        return blake2b(before + _packed(keys), digest_size=16, key=self._key).digest()


def _number(digest: bytes) -> int:
    return int.from_bytes(digest[:_BYTES], "little")


def _packed(keys: Sequence[int | bytes]) -> bytes:
    try:
        return array("q", cast("Sequence[int]", keys)).tobytes()
    except TypeError:  # digests of other content than tokens
        return repr(list(keys)).encode()
