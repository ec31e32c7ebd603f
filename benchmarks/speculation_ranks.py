"""The process of a rank whose drafts are accepted with a given probability; started by speculation_gpu.py.

`ACCEPTANCE` is the environment variable with the probability.
"""

from __future__ import annotations

import os
import sys

ACCEPTANCE = "OCTAVO_BENCHMARK_ACCEPTANCE"


def accept_some(share: float) -> None:
    """Accept each draft with this probability if those before it were; equally on all ranks.

    In a tree, the second token after a draft is accepted with this share of what the first one leaves, and so on.
    """
    import torch
    from torch import Tensor

    from octavo.worker import branches
    from octavo.worker.resident import drafts as verification

    generators: dict[torch.device, torch.Generator] = {}
    verify_branches = branches.verify_branches

    def luck(rows: int, columns: int, device: torch.device) -> Tensor:
        if device not in generators:
            generators[device] = torch.Generator(device).manual_seed(0)
        return torch.rand(rows, columns, device=device, generator=generators[device])

    def verify(drawn: Tensor, drafts: Tensor, counts: Tensor, starts: Tensor) -> Tensor:
        order = torch.arange(drafts.shape[1], device=drafts.device)
        right = (luck(*drafts.shape, drafts.device) < share) & (order < counts[:, None])
        return 1 + right.long().cumprod(1).sum(1)

    def verify_trees(
        drawn: Tensor, drafts: Tensor, counts: Tensor, starts: Tensor, parents: Tensor, *shape: Tensor
    ) -> tuple[Tensor, Tensor]:
        rows, count = drafts.shape
        one = parents[:count]
        rank = ((one[:, None] == one) & (torch.ones(count, count, device=one.device).tril(-1) > 0)).sum(1)
        chance = luck(rows, 1 + count, drafts.device)[:, 1 + one]
        left = (1 - share) ** rank.float()
        right = (chance < 1 - left * (1 - share)) & (chance >= 1 - left)
        # Each draft gets a token of its own, which is drawn after the one before it if it is accepted.
        tokens = torch.arange(count, device=one.device).expand(rows, count)
        chosen = torch.full((rows, 1 + count), -1, dtype=torch.int64, device=one.device)
        chosen.scatter_reduce_(1, (1 + one).expand(rows, count), torch.where(right, tokens, -1), "amax")
        flat = torch.arange(rows, device=one.device) * (1 + count)
        return verify_branches(chosen.flatten(), tokens, counts, flat, parents, *shape)

    verification.verify = verify
    branches.verify_branches = verify_trees


if __name__ == "__main__":
    from octavo.rank_main import main

    accept_some(float(os.environ[ACCEPTANCE]))
    sys.exit(main(*sys.argv[1:]))
