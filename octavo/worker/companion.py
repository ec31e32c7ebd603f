"""`Companion`: another model on a worker's device, which keeps its own keys and values for the same KV blocks."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal

import torch

from octavo.config import CacheConfig, DeviceConfig
from octavo.core.cache_groups import CacheGroup, GroupKind
from octavo.core.errors import ConfigError
from octavo.core.plan import NewRow, StepPlan
from octavo.core.worker_info import RankPlace
from octavo.device.base import Device
from octavo.hub.files import ModelFiles
from octavo.models.implementation import OWN, Implementation
from octavo.nn.attention.native import NativeBackend
from octavo.nn.cached import CachedLayer
from octavo.nn.quant.base import Schemes, everywhere
from octavo.nn.quant.blocks import RoundedBlocks
from octavo.nn.weights import Keep, fused
from octavo.worker.hooks import Capacity, Reserved
from octavo.worker.runner import Runner
from octavo.worker.worker import Worker


class Companion(Worker):
    """A model for a feature, such as one that drafts. Device, threads, ranks and settings are those of a worker.

    Its layers follow the block tables of one group of the worker's model, and have memory of their own for each block:
    a block holds the same positions for both models, so what is shared, copied or freed is so for both.

    Attributes:
        followed: the worker's cache group whose block tables it follows.
    """

    def __init__(
        self,
        beside: Worker,
        files: ModelFiles,
        implementation: Implementation = OWN,
        dtype: Literal["auto"] | None = None,
        *,
        rounded: bool = False,
    ) -> None:
        """
        Args:
            beside: a worker whose weights are loaded.
            dtype: in place of the setting `dtype`.
            rounded: round weights to 8-bit integers if the model runs as a native program.

        Raises:
            ConfigError: the settings, or an architecture, that it can't have.
        """
        self._beside, self._name, self._rounded = beside, f"the companion model {files.name}", rounded
        self.followed = followed_group(beside.cache_groups)
        chosen, gguf = beside.config, files.format == "gguf"
        random = chosen.load_format == "dummy" and not files.weights
        config = dataclasses.replace(
            chosen,
            model=files.name,
            hf_overrides={},
            rope_scaling={},
            rope_theta=None,
            disable_sliding_window=False,
            dtype=chosen.dtype if dtype is None else dtype,
            load_format="dummy" if random else "auto",
            activation_dtype=chosen.activation_dtype if gguf else "int16",
            head_dtype="auto",
            logprobs_mode="raw_logprobs",
        )
        cache = CacheConfig(block_size=beside.block_size, kv_cache_dtype=beside.kv_cache_dtype)
        mesh, per_node = beside.mesh, min(beside.mesh.size, beside.place.per_node)
        place = RankPlace(mesh.rank, mesh.size, per_node=per_node)  # it is divided over ranks, not over stages
        super().__init__(config, beside.settings, files, cache, implementation, place, beside.parallel)
        self.mesh = dataclasses.replace(beside.mesh, context=None)  # small, so every rank computes all of its tokens

    def _prepared_device(self, settings: DeviceConfig) -> Device:
        return self._beside.device

    def _join(self) -> None:
        """Do nothing: the worker has met the other ranks."""

    def prepare_kernels(self) -> None:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # the threads of native kernels are shared
        super().prepare_kernels()
        torch.set_num_threads(threads)
        if isinstance(self.attention, NativeBackend) and isinstance(self._beside.attention, NativeBackend):
            self.attention.pool = self._beside.attention.pool

    def _schemes(self, keep: Keep = fused) -> Schemes:
        if self._rounded and self._takes_native:
            return everywhere(RoundedBlocks, self.dtype, self.device.torch_device, keep)
        return super()._schemes(keep)

    def _groups_of(self, layers: Sequence[CachedLayer]) -> tuple[CacheGroup, ...]:
        return companion_groups(self.files.name, [layer.keeps(self.block_size) for layer in layers])

    def reserved_for(self, limits: tuple[int, int]) -> Reserved:
        """Return its memory, once its weights are loaded.

        Args:
            limits: sequences at once, and tokens of a step, at most.
        """
        block = self.kv_bytes_per_token * self.block_size
        return Reserved(self.weight_bytes, self.workspace_bytes(*limits, 0), block)

    def runner(self, num_blocks: int, room: Capacity) -> Runner:
        """Allocate its memory for each of the KV blocks, and slots like the worker's."""
        return self.make_runner(
            num_blocks=num_blocks,
            num_slots=room.num_slots,
            max_model_len=room.max_model_len,
            max_step_tokens=room.max_step_tokens,
            max_drafts=room.max_drafts,
        )

    def changes(self, plan: StepPlan, new: list[NewRow]) -> StepPlan:
        """Return a plan without rows, with the changes of block tables and the copies of a plan of the worker's model.

        Args:
            new: the plan's new rows in this model's form, with the block tables of all groups.
        """
        own = self.followed
        return StepPlan(
            id=plan.id,
            new=[_with_blocks(row, [row.blocks[own]]) for row in new],
            slots=[],
            num_tokens=[],
            num_drafts=[],
            samples=[],
            block_writes=[(slot, 0, index, block) for slot, group, index, block in plan.block_writes if group == own],
            copies=plan.copies,
        )


def _with_blocks(row: NewRow, blocks: list[list[int]]) -> NewRow:
    return NewRow(
        slot=row.slot,
        tokens=row.tokens,
        num_prompt=row.num_prompt,
        params=row.params,
        seed=row.seed,
        stop_ids=row.stop_ids,
        num_computed=row.num_computed,
        blocks=blocks,
    )


def followed_group(groups: tuple[CacheGroup, ...]) -> int:
    """Return the group whose block tables a companion follows: one that keeps all positions, else the widest window."""
    whole = [number for number, group in enumerate(groups) if group.kind is GroupKind.FULL]
    return whole[0] if whole else max(range(len(groups)), key=lambda number: groups[number].window)


def companion_groups(name: str, kinds: Sequence[CacheGroup]) -> tuple[CacheGroup, ...]:
    """Return the cache groups of a companion whose layers keep this. All are in one group, also those with windows: the
    tables that they follow have all blocks.

    Raises:
        ConfigError: a layer keeps a state.
    """
    if any(kind.kind is GroupKind.STATE for kind in kinds):
        raise ConfigError(
            f"{name} has recurrent layers, whose states can't take back rejected tokens. Name a model without them."
        )
    return (CacheGroup(layers=tuple(range(len(kinds)))),)
