"""`Held`: how the request in a slot is sampled. Slots on the host and on a device keep one for each request."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from octavo.core.plan import StepPlan
from octavo.sampling.state import PreparedParams
from octavo.worker.step import PromptRow


@dataclass(slots=True)
class Held:
    """`num_prompt`: length of the request's prompt in tokens."""

    params: PreparedParams
    num_prompt: int


def prompt_rows(
    plan: StepPlan,
    held: Sequence[Held | None],
    computed: NDArray[np.int64],
    tokens: Callable[[int, int, int], Tensor],
) -> list[PromptRow]:
    """Return the rows that compute part of a prompt whose log-probabilities were requested.

    Args:
        held: by slot.
        computed: [slots], number of positions computed before the plan.
        tokens: returns a slot's known tokens from a position to another, int32.
    """
    found = []
    start = 0
    for row, (slot, count) in enumerate(zip(plan.slots, plan.num_tokens, strict=True)):
        one = held[slot]
        if one is not None and one.params.prompt_logprobs is not None:
            first = int(computed[slot]) + 1
            known = min(count, one.num_prompt - first)
            if known > 0:
                found.append(PromptRow(row, start, one.params.prompt_logprobs, tokens(slot, first, first + known)))
        start += count
    return found
