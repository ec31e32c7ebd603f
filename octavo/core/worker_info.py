"""Facts and sizes that worker and engine exchange while the worker is built; no live objects."""

from __future__ import annotations

from typing import Literal

import msgspec

from octavo.core.cache_groups import FULL, CacheGroup


class RankPlace(msgspec.Struct, frozen=True):
    """A rank's place among those that compute one model.

    Attributes:
        rank, size: its number, and the number of ranks.
        host, port: where the ranks find each other.
        stages: of the pipeline; each has consecutive ranks.
        contexts: groups of consecutive ranks of a stage that have the same layers. The ranks of a group divide the
            layers, and the groups the tokens of large steps.
        per_node: ranks of one machine, which are consecutive; 0 if all are on one.
        memory: descriptor of the file in memory that the ranks of the group share; -1 if they share none.
    """

    rank: int = 0
    size: int = 1
    host: str = ""
    port: int = 0
    stages: int = 1
    per_node: int = 0
    memory: int = -1
    contexts: int = 1

    @property
    def local(self) -> tuple[int, int]:
        """The rank's number among those of its machine, and their number."""
        count = self.per_node or self.size
        return self.rank % count, count

    @property
    def shards(self) -> int:
        """The number of ranks that divide each layer."""
        return self.size // (self.stages * self.contexts)

    @property
    def shard(self) -> int:
        """The rank's number among those of its group."""
        return self.rank % self.shards

    @property
    def group(self) -> int:
        """The number of the rank's group among all, stage by stage."""
        return self.rank // self.shards

    @property
    def context(self) -> int:
        """The number of the rank's group among those of its stage."""
        return self.group % self.contexts

    @property
    def stage(self) -> int:
        return self.group // self.contexts

    @property
    def group_is_local(self) -> bool:
        """Whether one machine has all ranks of the group."""
        each, first = self.per_node or self.size, self.group * self.shards
        return first // each == (first + self.shards - 1) // each

    @property
    def answers(self) -> bool:
        """Whether the engine reads the steps' outputs of this rank: the first of the last stage, which samples."""
        return self.rank == self.size - self.shards * self.contexts


class WorkerFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Known before any weight is read. Lengths in tokens.

    Attributes:
        device: its name, for display.
        accelerator: "cuda" or "cpu".
        torch_device: torch's name of the device.
        default_depth: default number of steps launched ahead.
        default_limits: default number of sequences that run at once, of tokens of a step, and of tokens of a step when
            only throughput matters.
        balanced_tokens: tokens of a step up to which its matrix products take little longer than reading the weights.
        dtype: of activations.
        vocab_size: columns of the logits.
        hidden_size: elements of the embedding of one token.
        max_position: the model's longest context.
        num_labels: outputs of the model's classification head; 0 without one.
        summary: default pooling: which hidden states represent a prompt, unless the checkpoint specifies it.
    """

    device: str
    accelerator: str
    torch_device: str
    default_depth: int
    default_limits: tuple[int, int, int]
    balanced_tokens: int
    dtype: str
    vocab_size: int
    hidden_size: int
    max_position: int
    num_labels: int = 0
    summary: Literal["mean", "cls", "last"] = "last"


class LoadedFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Known once the weights are loaded. Sizes in bytes.

    Attributes:
        weight_bytes: memory of the weights.
        weight_form: name of the storage format, for display.
        kernels: name of the kernels, for display.
        advice: a setting that would suit this machine, for display; usually empty.
        step_parameters, step_weight_bytes: weights that every step reads: their number, and their bytes.
        kv_bytes_per_token: keys and values of one token over all layers of one cache group; 0 without a KV cache.
        block_size: tokens of a KV block.
        groups: layers that share a block table.
        block_bytes_besides: memory that features need for each block of the KV cache.
        kv_budget: memory for the KV cache; None if the settings give its size.
    """

    weight_bytes: int
    weight_form: str
    kernels: str = ""
    advice: str = ""
    step_parameters: int = 0
    step_weight_bytes: int = 0
    kv_bytes_per_token: int = 0
    block_bytes_besides: int = 0
    block_size: int = 16
    groups: tuple[CacheGroup, ...] = FULL
    kv_budget: int | None = None

    @property
    def block_bytes(self) -> int:
        """Memory of a block, that of features included."""
        return self.block_size * self.kv_bytes_per_token + self.block_bytes_besides


MOST_DRAFTED = 64
"""Requests that may have all their drafts in one step; if there are more, each has fewer. It bounds a step's logits."""


def most_results(num_seqs: int, max_step_tokens: int, max_drafts: int) -> int:
    """Return the most tokens of a step that get logits: one of each request, and the drafts."""
    drafts = min(num_seqs, MOST_DRAFTED) * max_drafts
    return min(num_seqs + drafts, max(num_seqs, max_step_tokens))


class CacheSizes(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of a worker's allocations.

    Attributes:
        num_blocks: of the KV cache.
        num_slots: requests that run at once.
        max_model_len: tokens of the longest request.
        max_step_tokens: tokens of the largest step.
        max_drafts: draft tokens of a row at most; 0 if no feature drafts.
    """

    num_blocks: int
    num_slots: int
    max_model_len: int
    max_step_tokens: int
    max_drafts: int = 0
