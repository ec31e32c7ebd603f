"""The memory of the largest step, which the KV cache leaves free, has room for all rows of logits."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from octavo.config import ParallelConfig
from octavo.parallel.mesh import ALONE, Mesh
from octavo.worker.worker import Worker
from octavo.worker.workspace import rows_of_logits, workspace_bytes

DIVIDED = {"enable_expert_parallel": True}
SPEC: Any = SimpleNamespace(vocab_size=131, hidden_size=64, intermediate_size=96, max_position=128)


def test_the_bytes_of_a_step() -> None:
    given = {"token_elements": 100, "groups": 1, "logits": 10, "limits": (8, 32)}
    token, slots = (6 * 64 + 3 * 96) * 2, 8 * 128 * 5
    assert workspace_bytes(SPEC, torch.bfloat16, ALONE, **given) == 32 * token + 10 * 131 * 16 + slots


@pytest.mark.parametrize(
    ("ranks", "vocab_size", "settings", "limits", "rows"),
    [
        (2, 131, DIVIDED, (8, 64), 16),  # with padding, twice the requests
        (3, 130, DIVIDED, (8, 64), 18),
        (2, 130, DIVIDED, (8, 64), 8),  # the ranks divide the vocabulary
        (2, 131, {}, (8, 64), 8),  # replicas
        (1, 131, DIVIDED, (8, 64), 8),
        (2, 131, DIVIDED | {"all2all_backend": "all_to_all"}, (8, 64), 8),  # nothing is recorded
    ],
)
def test_recorded_steps_have_rows_of_all_ranks(
    ranks: int, vocab_size: int, settings: dict[str, Any], limits: tuple[int, int], rows: int
) -> None:
    pytest.importorskip("triton")
    parallel = ParallelConfig(data_parallel_size=ranks, **settings)
    assert rows_of_logits(vocab_size, parallel, limits, 0, recorded=True) == rows
    assert rows_of_logits(vocab_size, parallel, limits, 0, recorded=False) == 8


@pytest.mark.parametrize(("eager", "resident", "rows"), [(False, True, 16), (True, True, 8), (False, False, 8)])
def test_a_worker_counts_them(eager: bool, resident: bool, rows: int) -> None:
    pytest.importorskip("triton")
    worker: Any = SimpleNamespace(
        spec=SPEC,
        dtype=torch.float32,
        mesh=Mesh(0, 2),
        parallel=ParallelConfig(data_parallel_size=2, **DIVIDED),
        device=SimpleNamespace(resident=resident),
        settings=SimpleNamespace(enforce_eager=eager),
        cache_groups=[None],
        _layer=SimpleNamespace(token_elements=100),
    )
    with_one = workspace_bytes(SPEC, torch.float32, worker.mesh, token_elements=100, groups=1, logits=1, limits=(8, 64))
    assert Worker.workspace_bytes(worker, 8, 64, 0) - with_one == (rows - 1) * 131 * 16
