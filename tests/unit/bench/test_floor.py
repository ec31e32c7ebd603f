from __future__ import annotations

import msgspec
import pytest

from octavo.bench.floor import Ceilings, floor_seconds, share_text
from octavo.core.info import ModelInfo
from octavo.device.ceilings import measure_ceilings

CEILINGS = Ceilings(bytes_per_s=1e9, operations_per_s=1e12)
INFO = ModelInfo(
    name="m",
    architecture="A",
    device="d",
    dtype="float32",
    vocab_size=10,
    max_model_len=100,
    eos_token_ids=[],
    num_blocks=1,
    block_size=16,
    kv_bytes_per_token=1000,
    max_num_seqs=4,
    max_num_batched_tokens=16,
    memory={},
    phases={},
    step_parameters=10**8,
    step_weight_bytes=2 * 10**8,
)


def test_a_prompt_alone_costs_its_operations():
    assert floor_seconds([(50, 1)], INFO, CEILINGS) == pytest.approx(50 * 2e8 / 1e12)


def test_each_further_token_reads_weights_and_context():
    prompt = floor_seconds([(50, 1)], INFO, CEILINGS)
    assert floor_seconds([(50, 3)], INFO, CEILINGS) == pytest.approx(prompt + 2 * 0.2 + (51 + 52) * 1e-6)


def test_layers_with_windows_read_no_more_than_those():
    info = msgspec.structs.replace(INFO, kv_groups=2, kv_longest=9, kv_reads=[(0, 400), (40, 600)])
    prompt = floor_seconds([(38, 1)], info, CEILINGS)
    read = (39 + 40 + 41) * 400e-9 + (39 + 40 + 40) * 600e-9
    assert floor_seconds([(38, 4)], info, CEILINGS) == pytest.approx(prompt + 3 * 0.2 + read)


def test_rows_share_a_reading_of_the_weights_up_to_the_engines_limit():
    def decoding(rows: int) -> float:
        return floor_seconds([(1, 2)] * rows, INFO, CEILINGS) - floor_seconds([(1, 1)] * rows, INFO, CEILINGS)

    assert decoding(4) == pytest.approx(0.2 + 4 * 2e-6)
    assert decoding(5) == pytest.approx(0.4 + 5 * 2e-6)


def test_many_rows_are_bound_by_operations():
    wide = Ceilings(bytes_per_s=1e15, operations_per_s=1e12)
    assert floor_seconds([(1, 2)] * 3, INFO, wide) == pytest.approx(6 * 2e-4, rel=1e-3)


def test_ceilings_are_measured():
    found = Ceilings(*measure_ceilings("cpu", "float32"))
    assert found.bytes_per_s > 1e8
    assert found.operations_per_s > 1e8
    assert "GB/s" in found.text()


def test_more_than_is_possible_is_never_claimed() -> None:
    assert share_text(0.451) == "so 45% of what is possible"
    assert "which this run beats (166%)" in share_text(1.66)
