"""`Tier`: where KV blocks are kept besides the device's memory, and the names by which they are known there.

A block's content is called a page. Pages are named by content: a digest of all keys from the start of the sequence to
the end of the block. Equal prefixes have equal names in every process and on every machine, so a tier on a disk or in
another machine can be shared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Protocol

import msgspec

from octavo.cache.prefix_tree import Key

_FORM = 1
"""Changes with the way in which names are made."""
_encode = msgspec.msgpack.Encoder().encode


class BlockNames:
    """The names of a sequence's full blocks, made as they are needed.

    The name of a block is BLAKE2b (RFC 7693) over the name before it and the block's keys; the first follows a name of
    everything else that the content depends on.

    Args:
        realm: the model, its weights and the form of its pages. Pages of different realms can't be exchanged.
        namespace: whose requests may share them.
    """

    def __init__(self, realm: str, namespace: str, block_size: int) -> None:
        self._size = block_size
        self._root = _digest(_encode([_FORM, realm, namespace, block_size]))
        self._names: list[bytes] = []

    def upto(self, keys: Sequence[Key], count: int) -> Sequence[bytes]:
        """Return the names of at least the first `count` blocks. `keys` begin as those of earlier calls did."""
        names, size = self._names, self._size
        for index in range(len(names), count):
            before = names[-1] if names else self._root
            names.append(_digest(before + _encode(keys[index * size : (index + 1) * size])))
        return names


def page_name(block: bytes, group: int) -> bytes:
    """Name the page of one group of layers, given its block's name."""
    return block + group.to_bytes(2, "big")


def _digest(data: bytes) -> bytes:
    return blake2b(data, digest_size=32).digest()


class Tier(Protocol):
    """The engine half of a tier: it knows which pages can be loaded. The worker half moves them.

    All methods are called while a step is planned or taken in, so they must answer from memory, without I/O.

    Attributes:
        name: that of the feature that brings it.
        deadline_s: seconds that a request waits for a load; after that it computes the rest of its prompt itself.
    """

    name: str
    deadline_s: float

    def holds(self, page: bytes) -> bool:
        """Whether the page can be loaded."""
        ...

    def wants(self, options: Mapping[str, msgspec.Raw]) -> bool:
        """Whether it stores what a request with these options computes."""
        return True

    def wants_shared(self, options: Mapping[str, msgspec.Raw]) -> bool:
        """Whether it also stores, when such a request is admitted, the blocks that the request shares with others."""
        return False

    def lacks(self, page: bytes) -> bool:
        """Whether a computed page should be stored."""
        return not self.holds(page)

    def storing(self, pages: Sequence[bytes]) -> None:
        """The worker half will get these pages; `stored` or `not_stored` follows, or `EngineHook.on_failure`."""
        return

    def stored(self, pages: Sequence[bytes], before: Sequence[bytes]) -> None:
        """The worker half holds these pages now.

        Args:
            before: for each the page before it in its sequence, without which it is of no use; b"" for the first.
        """
        ...

    def not_stored(self, pages: Sequence[bytes]) -> None:
        """The worker half failed to store these pages, or it is not known whether it did; some ranks may have."""
        ...

    def lost(self, pages: Sequence[bytes]) -> None:
        """The worker half could not load these pages."""
        ...
