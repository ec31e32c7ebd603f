"""Decode latents in Triton where a plan (`nn/attention/triton_plan.py`) divides rows by their lengths."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from octavo.device.launch_sizes import cdiv, next_power_of_2
from octavo.nn.attention import triton_plan
from octavo.nn.attention.triton_few import Few
from octavo.nn.latent.base import LatentSpec
from octavo.nn.latent.triton_merge import merge_planned_kernel
from octavo.nn.ops.ring import multiprocessors
from octavo.nn.ops.triton_overlap import overlap
from octavo.nn.step import StepInput

_EACH = 2
"""Parts of each multiprocessor at most, beyond one of each row."""
_MOST_EQUAL = 16
"""Number of programs for each row from which on no plan is needed: even a long context is divided enough."""
_BOUNDS = triton_plan.Bounds(least=64, most=128)
_GROUP, _MERGED = 4, 4
"""Most heads, and parts, that a program merges at a time."""


class Planned(NamedTuple):
    """One step's plan, and memory for the parts of a layer.

    Attributes:
        plan: [slots, 4] int32, and counters that are not used.
        parts: sums [parts, heads, rank], and the logarithms, to base 2, of their weights [parts, heads], float32.
    """

    plan: Tensor
    slots: int
    parts: tuple[Tensor, Tensor]


def needed(few: Few, tiles: int, step: StepInput) -> bool:
    """Return whether rows with `tiles` tiles of heads are divided by their lengths."""
    programs = _EACH * multiprocessors(step.device)
    long = step.max_seq_len >= 2 * _BOUNDS.least
    return few.queries == 1 and long and few.count * tiles > programs // _MOST_EQUAL


def plan_of(few: Few, tiles: int, spec: LatentSpec, step: StepInput) -> Planned:
    """Return the plan, which the first of the step's layers makes."""
    more = cdiv(_EACH * multiprocessors(step.device), tiles)
    slots = few.count + more
    plan = few.plans.get(tiles)
    if plan is None:
        plan = few.plans[tiles] = torch.empty(4 * slots + 1, dtype=torch.int32, device=step.device)
        triton_plan.launch(plan, few.rows, step.seq_lens, few.count, more, 1, _BOUNDS)
    sums = torch.empty(more, spec.num_heads, spec.rank, dtype=torch.float32, device=step.device)
    return Planned(plan, slots, (sums, torch.empty(sums.shape[:2], dtype=torch.float32, device=step.device)))


def merge(plan: Planned, few: Few, step: StepInput, spec: LatentSpec, out: Tensor) -> None:
    """Write divided rows of `out` [T, heads, rank]."""
    group = math.gcd(_GROUP, spec.num_heads)
    merge_planned_kernel[(spec.num_heads // group, plan.slots)](
        *plan.parts,
        out,
        plan.plan,
        step.query_start if few.rows is None else few.rows,
        step.query_start,
        HEADS=spec.num_heads,
        GROUP=group,
        D=spec.rank,
        BLOCK_D=next_power_of_2(spec.rank),
        MERGED=_MERGED,
        HAS_ROWS=few.rows is not None,
        num_warps=4,
        **overlap(out.device),
    )
