"""The KV cache of a divided model has as many blocks as fit in every rank, whatever each keeps in one."""

from __future__ import annotations

from octavo.core.worker_info import LoadedFacts
from octavo.engine.multiproc import _together


def test_a_stage_with_more_than_keys_and_values_in_a_block_counts_too() -> None:
    first = LoadedFacts(weight_bytes=3, weight_form="x", kv_bytes_per_token=100, block_size=16, kv_budget=10 * 1600)
    last = LoadedFacts(
        weight_bytes=4,
        weight_form="x",
        kv_bytes_per_token=50,
        block_size=16,
        block_bytes_besides=1600,  # a drafting model's
        kv_budget=7 * (16 * 50 + 1600) + 5,
    )
    for found in ([first, last], [last, first]):
        whole = _together(found, 2)
        assert whole.block_bytes == 2400
        assert whole.kv_budget is not None
        assert whole.kv_budget // whole.block_bytes == 7
        assert whole.weight_bytes == 7
