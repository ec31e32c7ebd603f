"""Experts that are divided over ranks whole give the tokens of one device."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from rank_kit import ThreadCollectives, ranks_in_threads
from test_several_ranks import engine, run
from toy_models import LLAMA

from octavo.core.errors import ConfigError
from octavo.nn.build import Build
from octavo.nn.experts_spec import ExpertsForm
from octavo.nn.quant.base import everywhere
from octavo.nn.quant.none import Unquantized
from octavo.parallel.mesh import Mesh
from octavo.parallel.rows import sum_rows

_SMALL = LLAMA | {"num_hidden_layers": 2, "moe_intermediate_size": 24, "num_experts_per_tok": 2, "vocab_size": 132}
_DEEP = {"n_routed_experts": 8, "n_shared_experts": 1, "first_k_dense_replace": 1, "kv_lora_rank": 16}
_DEEP |= {"qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "q_lora_rank": 16}
FAMILIES: dict[str, dict[str, Any]] = {
    "Qwen2MoeForCausalLM": _SMALL | {"num_experts": 5, "shared_expert_intermediate_size": 40},
    "GptOssForCausalLM": _SMALL | {"num_local_experts": 4, "head_dim": 16, "sliding_window": 16},
    "MixtralForCausalLM": _SMALL | {"num_local_experts": 4},
    "DeepseekV3ForCausalLM": _SMALL | _DEEP | {"n_group": 4, "topk_group": 2, "num_key_value_heads": 4},
    "Llama4ForCausalLM": _SMALL | {"num_local_experts": 4, "num_experts_per_tok": 1, "intermediate_size_mlp": 64},
}
ALWAYS = ("Qwen2MoeForCausalLM", "GptOssForCausalLM")
EXPERTS = {"tensor_parallel_size": 2, "enable_expert_parallel": True}


@pytest.fixture(autouse=True)
def threads(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks_in_threads(monkeypatch)


@pytest.mark.parametrize(
    "name", [name if name in ALWAYS else pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES]
)
def test_tokens(name: str) -> None:
    config = FAMILIES[name] | {"architectures": [name], "model_type": "any"}
    few = {"max_model_len": 160, "max_num_seqs": 6}
    assert run(config, **few, **EXPERTS) == run(config, **few)


@pytest.mark.parametrize(
    ("name", "size"),
    [("Qwen2MoeForCausalLM", 2), *(pytest.param(name, 4, marks=pytest.mark.slow) for name in FAMILIES)],
)
def test_only_rows_of_tokens_that_chose_a_rank_are_sent(name: str, size: int) -> None:
    config = FAMILIES[name] | {"architectures": [name], "model_type": "any"}
    few = {"max_model_len": 160, "max_num_seqs": 6}
    sparse = EXPERTS | {"tensor_parallel_size": size, "all2all_backend": "all_to_all"}
    assert run(config, **few, **sparse) == run(config, **few)


@pytest.mark.slow
def test_in_a_pipeline() -> None:
    config = FAMILIES["Qwen2MoeForCausalLM"] | {"architectures": ["Qwen2MoeForCausalLM"], "model_type": "any"}
    assert run(config, pipeline_parallel_size=2, **EXPERTS) == run(config)


@pytest.mark.parametrize("bias", [False, True])
def test_a_rank_reads_its_experts_only(*, bias: bool) -> None:
    cpu = torch.device("cpu")
    schemes = everywhere(Unquantized, torch.float32, cpu)
    form = ExpertsForm(num_experts=5, hidden_size=8, size=6, bias=bias)
    ranks = [Build(torch.float32, cpu, None, schemes, "experts", mesh=Mesh(i, 2), whole_experts=True) for i in (0, 1)]
    layers = [b.experts(form) for b in ranks]
    assert [list(layer.form.owned) for layer in layers] == [[0, 1], [2, 3, 4]]
    names = [{want.name for want in layer.wanted()} for layer in layers]
    assert names[0] == set(layers[1].superseded)
    assert names[1] == set(layers[0].superseded)
    assert all(want.index is None for layer in layers for want in layer.wanted())
    with pytest.raises(ConfigError, match="--enable-expert-parallel: 5 experts can't be divided over 6 ranks"):
        Build(torch.float32, cpu, None, schemes, mesh=Mesh(0, 6), whole_experts=True).experts(form)


def test_what_has_no_effect_is_refused() -> None:
    with pytest.raises(ConfigError, match="divides experts over the ranks of --tensor-parallel-size, which is 1"):
        engine(enable_expert_parallel=True)
    with pytest.raises(ConfigError, match="--enable-expert-parallel: tiny has no experts"):
        engine(**EXPERTS)
    with pytest.raises(ConfigError, match="--all2all-backend all_to_all is for --enable-expert-parallel"):
        engine(all2all_backend="all_to_all")


@pytest.mark.parametrize("tokens", [0, 1, 5])
def test_rows_are_added_up_in_parts(tokens: int) -> None:
    """Three ranks, the last with few rows or none; what a rank does not have is never read."""
    generator = torch.Generator().manual_seed(tokens)
    given = [torch.randn(tokens, 4, generator=generator) for _ in range(3)]
    present = torch.rand(3, tokens, generator=generator) < 0.6
    barrier, kept = threading.Barrier(3), [torch.empty(0)] * 3
    expected = sum(x.masked_fill(~has[:, None], 0.0) for x, has in zip(given, present, strict=True))

    def compute(rank: int) -> torch.Tensor:
        x = given[rank].masked_fill(~present[rank][:, None], float("nan"))
        return sum_rows(x, present, Mesh(rank, 3, ThreadCollectives(rank, barrier, kept)))

    with ThreadPoolExecutor(3) as threads:
        found = list(threads.map(compute, range(3)))
    torch.testing.assert_close(found[0], expected)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
