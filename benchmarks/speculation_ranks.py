"""The process of a rank whose drafts are accepted with a given probability; started by speculation_gpu.py.

`ACCEPTANCE` is the environment variable with the probability.
"""

from __future__ import annotations

import os
import sys

ACCEPTANCE = "OCTAVO_BENCHMARK_ACCEPTANCE"


def accept_some(share: float) -> None:
    """Accept each draft with this probability if those before it were; equally on all ranks."""
    import torch
    from torch import Tensor

    from octavo.worker.resident import drafts as verification

    generators: dict[torch.device, torch.Generator] = {}

    def verify(drawn: Tensor, drafts: Tensor, counts: Tensor, starts: Tensor) -> Tensor:
        device = drafts.device
        if device not in generators:
            generators[device] = torch.Generator(device).manual_seed(0)
        order = torch.arange(drafts.shape[1], device=device)
        luck = torch.rand(drafts.shape, device=device, generator=generators[device])
        right = (luck < share) & (order < counts[:, None])
        return 1 + right.long().cumprod(1).sum(1)

    verification.verify = verify


if __name__ == "__main__":
    from octavo.rank_main import main

    accept_some(float(os.environ[ACCEPTANCE]))
    sys.exit(main(*sys.argv[1:]))
