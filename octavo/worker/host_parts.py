"""Parts of a runner in host memory: native ones if there are kernels, else torch."""

from __future__ import annotations

from collections.abc import Sequence

from octavo.core.cache_groups import CacheGroup
from octavo.core.params import LogprobsMode
from octavo.models.model import Model
from octavo.models.native import NativeDecoder
from octavo.nn.attention.native import NativeBackend
from octavo.nn.build import AnyBackend
from octavo.worker.branches import Branches
from octavo.worker.hooks import Capacity, Hooks
from octavo.worker.native_replay import NativeReplay
from octavo.worker.parts import NoReplay, Replay, Sampler
from octavo.worker.samplers import NativeSampler, TorchSampler
from octavo.worker.slots import HostSlots


def host_parts(
    model: Model,
    attention: AnyBackend,
    room: Capacity,
    block_size: int,
    vocab_size: int,
    groups: Sequence[CacheGroup],
    logprobs_mode: LogprobsMode,
    hooks: Hooks,
    branches: Branches | None,
) -> tuple[HostSlots, Sampler, Replay]:
    """Return slots, sampler and replay.

    Args:
        groups: cache groups of the model.
        branches: see `HostSlots`.
    """
    rewinds = not all(group.grows for group in groups)
    sizes = room.num_slots, room.max_model_len, block_size, vocab_size
    slots = HostSlots(
        *sizes, logprobs_mode, len(groups), rewinds=rewinds, added_tokens=hooks.added_tokens, branches=branches
    )
    sampler = NativeSampler(slots, attention.pool) if isinstance(attention, NativeBackend) else TorchSampler(slots)
    replay = NativeReplay(model, slots, hooks.variants()) if isinstance(model, NativeDecoder) else NoReplay()
    return slots, sampler, replay
