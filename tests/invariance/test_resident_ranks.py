"""Ranks whose layers are those of a GPU give one device's tokens, also with a single row.

Kernels run in Triton's interpreter, the ranks are threads; steps are not recorded.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")
if torch.cuda.is_available():
    pytest.skip("these ranks are threads on the CPU; test_gpu_ranks.py has those of GPUs", allow_module_level=True)

from rank_kit import ranks_in_threads
from toy_engine import drive, tiny_config, tokens_of
from toy_graphs import interpret_in_turns
from toy_models import LLAMA, QWEN3, VOCAB, Behind, model_files

from octavo.build import build_core
from octavo.core.params import SamplingParams
from octavo.core.request import GenerateRequest
from octavo.nn.ops import few_rows

EXPERTS = {"architectures": ["Qwen2MoeForCausalLM"], "num_experts": 4, "num_experts_per_tok": 2}
EXPERTS |= {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 48}


def tokens(config: dict[str, Any], **settings: Any) -> dict[tuple[str, int], list[int]]:
    where = {"device": "cpu", "cpu_bind": "nobind", "attention_backend": "triton", "enforce_eager": True}
    small = {"memory_bytes": 1 << 21, "max_num_seqs": 4, "max_num_batched_tokens": 48}
    loop = build_core(tiny_config(**small | where | settings), model_files(config))[0]
    params = (SamplingParams(max_tokens=count, temperature=0, ignore_eos=True) for count in (2, 7))
    asked = [GenerateRequest(id=str(i), tokens=list(range(5 + i, 14)), params=each) for i, each in enumerate(params)]
    found = tokens_of(drive(loop, asked))
    loop.close()
    return found


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(LLAMA, id="llama", marks=pytest.mark.slow),
        pytest.param(QWEN3, id="qwen3"),
        pytest.param(LLAMA | EXPERTS, id="experts"),
    ],
)
def test_tokens(config: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    ranks_in_threads(monkeypatch)
    interpret_in_turns(monkeypatch)
    monkeypatch.setattr("octavo.worker.worker.select_device", lambda name: Behind())
    alone: set[tuple[torch.Size, bool]] = set()
    product = few_rows.fused_product

    def noted(x: torch.Tensor, weight: torch.Tensor, **fused: Any) -> torch.Tensor:
        if fused.get("norm") is None and fused.get("add_to") is None:
            alone.add((weight.shape, bool(fused.get("gated"))))
        return product(x, weight, **fused)

    monkeypatch.setattr(few_rows, "fused_product", noted)
    expected = tokens(config | {"vocab_size": VOCAB + 1})
    before = set(alone)
    assert tokens(config | {"vocab_size": VOCAB + 1}, tensor_parallel_size=2) == expected
    assert {gated for _, gated in alone - before} == {False, True}, "one row takes the kernels of one row"
