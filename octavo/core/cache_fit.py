"""`CacheFit`: the longest request that a KV cache of limited size holds."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass

from octavo.core.cache_groups import CacheGroup, blocks_held
from octavo.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class CacheFit:
    """Sizes of a KV cache.

    Attributes:
        block_size: tokens of a block.
        block_bytes: memory of a block.
        in_flight: most tokens of one request in launched steps.
        num_bytes: memory of the cache.
        asked: its number of blocks, if that is set.
    """

    groups: Sequence[CacheGroup]
    block_size: int
    block_bytes: int
    in_flight: int
    num_bytes: int
    asked: int | None = None

    @property
    def most_blocks(self) -> int:
        """The number of blocks that the memory holds, or the set one."""
        return self.asked or self.num_bytes // self.block_bytes

    def held(self, tokens: int) -> int:
        """Return the most blocks that a request of this many tokens holds."""
        return blocks_held(self.groups, tokens, self.block_size, self.in_flight)

    def longest(self, num_blocks: int, most: int) -> int:
        """Return the tokens of the longest request that fits into `num_blocks`, at most `most`."""
        return bisect.bisect_right(range(most + 1), num_blocks, key=self.held) - 1

    def check(self, max_model_len: int) -> None:
        """Raise ConfigError if a request of this set length does not fit."""
        need = self.held(max_model_len)
        if need <= self.most_blocks:
            return
        raise ConfigError(
            f"One request of --max-model-len {max_model_len} needs {need * self.block_bytes} bytes of KV cache, but "
            f"there are only {self.num_bytes}. Lower --max-model-len to "
            f"{max(self.longest(self.most_blocks, max_model_len), 1)}, raise {self.setting_for(need)}, or use "
            "--dtype bfloat16 if it runs in float32."
        )

    def setting_for(self, num_blocks: int) -> str:
        """Return the setting that sizes the cache, with a value that is enough for `num_blocks`."""
        if self.asked is None:
            return f"--kv-cache-memory-bytes to {num_blocks * self.block_bytes}"
        return f"--num-gpu-blocks-override to {num_blocks}"


def check_positions(max_model_len: int | None, longest: int) -> None:
    """Raise ConfigError if the set length exceeds the model's positions."""
    if max_model_len is not None and max_model_len > longest:
        raise ConfigError(
            f"--max-model-len {max_model_len} is more than the model's own maximum of {longest} positions; use at most "
            "that."
        )
