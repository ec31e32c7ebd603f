"""`Offer`: what a server says of the KV blocks that another one may fetch; and the options of requests."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Literal

import msgspec

from octavo.cache.tier import page_name

NAME = "kv_transfer"
PARAM = "kv_transfer_params"
_MOST_GROUPS, _MOST_BLOCKS = 256, 1 << 24

Address = tuple[str, int]
"""Host and TCP port."""


class Offer(msgspec.Struct, frozen=True, kw_only=True):
    """The blocks of one prompt that a server keeps for others, as in `kv_transfer_params` of its answer.

    Routers pass it on unread. The names are vLLM's as far as it has them.

    Attributes:
        remote_host, remote_port: where rank 0 sends.
        remote_ranks: where each rank sends; a host may be empty, for that of the server's URL.
        blocks: for each group of layers, ranges [first, end) of the indices of blocks that are kept.
        last_block: the name of the prompt's last of these blocks, in hexadecimal digits. Names depend on all tokens
            before and on the model, so that two servers with the same name have the same blocks.
    """

    do_remote_prefill: Literal[True] = True
    do_remote_decode: Literal[False] = False
    remote_host: str
    remote_port: int
    remote_ranks: list[Address]
    blocks: list[list[tuple[int, int]]]
    last_block: str

    def __post_init__(self) -> None:
        """Raise ValueError, which msgspec reports, for malformed ranges, which could take very long to read."""
        if not self.remote_ranks or not all(0 <= port <= 65535 for _, port in self.remote_ranks):
            raise ValueError("`remote_ranks` must have a host and a TCP port for each rank")
        for ranges in self.blocks:
            bounds = [bound for one in ranges for bound in one]
            if any(after <= before for before, after in pairwise([-1, *bounds])) or bounds[-1:] > [_MOST_BLOCKS]:
                raise ValueError("`blocks` must be rising ranges")
        if len(self.blocks) > _MOST_GROUPS:
            raise ValueError(f"`blocks` has {len(self.blocks)} groups of layers")

    @property
    def num_blocks(self) -> int:
        """The index after the last block."""
        return max((end for ranges in self.blocks for _, end in ranges), default=0)

    def pages(self, names: Sequence[bytes]) -> list[bytes]:
        """Return the names of its pages, given those of the prompt's blocks; [] if the blocks differ."""
        count = self.num_blocks
        if not 0 < count <= len(names) or names[count - 1].hex() != self.last_block:
            return []
        return [
            page_name(names[index], group)
            for group, ranges in enumerate(self.blocks)
            for first, end in ranges
            for index in range(first, end)
        ]


def ranges_of(indices: Iterable[int]) -> list[tuple[int, int]]:
    """Return rising indices as ranges [first, end)."""
    found: list[tuple[int, int]] = []
    for index in indices:
        if found and found[-1][1] == index:
            found[-1] = found[-1][0], index + 1
        else:
            found.append((index, index + 1))
    return found


class Ask(msgspec.Struct, frozen=True, tag="ask"):
    """Have a prefill server compute the prompt, if enough of it is not cached here."""


class Fetch(msgspec.Struct, frozen=True, tag="fetch"):
    """Fetch the prompt's blocks: the client has had them computed."""

    offer: Offer


class Send(msgspec.Struct, frozen=True, tag="send"):
    """Keep the prompt's blocks for another server."""


class Local(msgspec.Struct, frozen=True, tag="local"):
    """Compute the prompt here."""


Option = Ask | Fetch | Send | Local

_SEND = msgspec.msgpack.encode(Send())
_decode = msgspec.msgpack.Decoder(Option).decode


def option_of(options: Mapping[str, msgspec.Raw]) -> Option | None:
    given = options.get(NAME)
    return None if given is None else _decode(given)


def is_sent(options: Mapping[str, msgspec.Raw]) -> bool:
    """Whether the blocks of a request with these options are kept for another server."""
    given = options.get(NAME)
    return given is not None and bytes(given) == _SEND


def kept_ranges(names: Sequence[bytes], groups: int, kept: Callable[[bytes], bool]) -> Iterator[list[tuple[int, int]]]:
    """For each group, the ranges of the blocks whose pages are `kept`."""
    for group in range(groups):
        yield ranges_of(index for index, name in enumerate(names) if kept(page_name(name, group)))
