"""The memory that the largest step needs besides weights and KV cache."""

from __future__ import annotations

import torch

from octavo.config import ParallelConfig
from octavo.core.worker_info import most_results
from octavo.models.model import ModelSpec
from octavo.parallel.mesh import Mesh
from octavo.worker.resident.row_counts import own_sizes

Limits = tuple[int, int]
"""Most sequences at once, and most tokens of a step."""


def workspace_bytes(
    spec: ModelSpec, dtype: torch.dtype, mesh: Mesh, *, token_elements: int, groups: int, logits: int, limits: Limits
) -> int:
    """Return the bytes of the residual stream and of the widest layer; of logits, a copy and counts; and of slots.

    Args:
        token_elements: values of a token in attention.
        groups: of layers that share a block table.
        logits: rows of them; see `rows_of_logits`.
    """
    num_seqs, step_tokens = limits
    widest = max(token_elements, 3 * spec.intermediate_size // mesh.size)
    token = (6 * spec.hidden_size + widest) * dtype.itemsize
    slots = num_seqs * spec.max_position * (19 + groups) // 4
    return step_tokens * token + logits * spec.vocab_size * 16 + slots


def rows_of_logits(
    vocab_size: int, parallel: ParallelConfig, limits: Limits, max_drafts: int, *, recorded: bool
) -> int:
    """Return the most rows of whole logits of a step, padding included.

    With data-parallel attention, recorded steps have equally many rows of each rank, up to about twice the requests. If
    the ranks divide the vocabulary, each has only its part of these logits, which is no more than half.

    Args:
        recorded: steps of decoding are recorded, where the model allows it.
    """
    results = most_results(*limits, max_drafts)
    ranks = parallel.cache_ranks
    if not (recorded and parallel.divides_requests and vocab_size % ranks) or parallel.exchanges_rows:
        return results
    return max(results, own_sizes(ranks, limits[0])[-1])
