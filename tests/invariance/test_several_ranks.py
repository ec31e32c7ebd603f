"""A model divided over ranks gives the tokens of one device, whatever else the engine does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from rank_kit import ThreadCollectives, ranks_in_threads
from test_invariance import requests
from test_rank import CROWDED, life
from test_recurrent_families import FAMILIES
from torch import Tensor
from toy_engine import drive, tiny_config, tokens_of
from toy_models import LATENT, LLAMA, QWEN3, model_files

from octavo.build import build_core
from octavo.core.errors import ConfigError
from octavo.core.output import TokenDelta, TokenLogprobs
from octavo.core.params import SamplingParams
from octavo.core.request import GenerateRequest
from octavo.engine.loop import EngineLoop
from octavo.nn.ops.norm import rms_norm
from octavo.parallel.shared import SharedMemory

EVEN = {"vocab_size": 132}
MODELS: dict[str, dict[str, Any]] = {
    "an odd vocabulary": LLAMA,
    "a divided vocabulary": LLAMA | EVEN,
    "a divided table for both ends": LLAMA | EVEN | {"tie_word_embeddings": True},
    "norms of heads": QWEN3 | EVEN,
    "latent attention": LATENT | EVEN,
    "windows": LLAMA
    | EVEN
    | {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 16, "head_dim": 16},
}
SETTINGS: dict[str, dict[str, Any]] = {
    "overlap, chunks and preemption": CROWDED,
    "no prefix cache": {"enable_prefix_caching": False},
    "int8 cache": {"kv_cache_dtype": "int8"},
}
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in list(SETTINGS)[1:]]


@pytest.fixture(autouse=True)
def threads(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks_in_threads(monkeypatch)


def engine(config: dict[str, Any] = LLAMA, **settings: Any) -> EngineLoop:
    return build_core(tiny_config(device="cpu", cpu_bind="nobind", **settings), model_files(config))[0]


def run(config: dict[str, Any] = LLAMA, **settings: Any) -> dict[tuple[str, int], list[int]]:
    loop = engine(config, **settings)
    found = tokens_of(drive(loop, requests()))
    loop.close()
    return found


CASES = [(model, size) for size in (2, 4) for model in MODELS]
QUICK = [
    ("an odd vocabulary", 2),
    ("latent attention", 2),
    ("a divided table for both ends", 2),
    ("windows", 4),
    ("norms of heads", 4),
]


@pytest.mark.parametrize(
    ("model", "size"), [*QUICK, *(pytest.param(*case, marks=pytest.mark.slow) for case in CASES if case not in QUICK)]
)
def test_tokens_of_each_model(model: str, size: int) -> None:
    config = MODELS[model]
    if size > config["num_attention_heads"]:
        with pytest.raises(ConfigError, match=f"attention heads on . kv heads can't be divided over {size} devices"):
            engine(config, tensor_parallel_size=size)
    else:
        assert run(config, tensor_parallel_size=size) == run(config)


@pytest.mark.parametrize("settings", [next(iter(SETTINGS)), *SLOW])
def test_tokens_under_each_setting(settings: str) -> None:
    assert run(tensor_parallel_size=2, **SETTINGS[settings]) == run(**SETTINGS[settings])


QWEN3_NEXT = "Qwen3NextForCausalLM"
RECURRENT = {name: config | {"architectures": [name], "model_type": "any"} for name, config in FAMILIES.items()}
RECURRENT |= {
    "one group": RECURRENT["BambaForCausalLM"] | {"mamba_n_groups": 1},
    "one head of keys": RECURRENT[QWEN3_NEXT] | {"linear_num_key_heads": 1},
    "not divisible": RECURRENT["BambaForCausalLM"] | {"mamba_n_heads": 9, "mamba_n_groups": 3, "mamba_expand": 2.25},
}
QUICK_RECURRENT = ("one group", QWEN3_NEXT)


@pytest.mark.parametrize(
    "name",
    [name if name in QUICK_RECURRENT else pytest.param(name, marks=pytest.mark.slow) for name in RECURRENT],
)
def test_recurrent_layers(name: str) -> None:
    config = RECURRENT[name] | {"initializer_range": 0.3}
    few = {"max_model_len": 128, "max_num_seqs": 4}
    assert run(config, tensor_parallel_size=2, **few) == run(config, **few)


@pytest.mark.slow
@pytest.mark.parametrize("name", RECURRENT)
def test_recurrent_layers_of_four_ranks_under_pressure(name: str) -> None:
    config = RECURRENT[name] | {"initializer_range": 0.3}
    tight = {"max_model_len": 128, "max_num_seqs": 6, "max_num_batched_tokens": 40, "async_scheduling": True}
    assert run(config, tensor_parallel_size=4, **tight) == run(config, **tight)


def test_states_are_divided() -> None:
    sizes = []
    for ranks in (1, 2):
        given = tiny_config(device="cpu", cpu_bind="nobind", max_model_len=128, tensor_parallel_size=ranks)
        loop, info = build_core(given, model_files(RECURRENT["Mamba2ForCausalLM"]))
        loop.close()
        sizes.append(info.memory["kv_cache"] // info.num_blocks)
    layers, inputs, numbers = 2, 160 * 3, 128 * 8  # float32
    assert sizes == [layers * 4 * (inputs + numbers), layers * 2 * (inputs + numbers)]


class LaterSum:
    """A sum of ranks in threads that the norm after it computes, as in GPUs' launches."""

    computed = 0

    def __init__(self, ranks: ThreadCollectives, x: Tensor) -> None:
        self.ranks, self.x = ranks, x

    def total(self) -> Tensor:
        return self.ranks.all_reduce(self.x)

    def normed_with(self, stream: Tensor, norm: tuple[Tensor, float], dtype: torch.dtype) -> Tensor:
        LaterSum.computed += 1
        stream += self.total()
        return rms_norm(stream, *norm, dtype)


class SummingLaterThreads(ThreadCollectives):
    """A class of its own: what classes have that `isinstance` asks about is remembered."""

    def summands(self, x: Tensor) -> LaterSum:
        return LaterSum(self, x)


def test_sums_that_the_next_norm_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks_in_threads(monkeypatch, native=False)
    expected = run()
    monkeypatch.setattr("rank_kit.ThreadCollectives", SummingLaterThreads)
    monkeypatch.setattr(LaterSum, "computed", 0)
    assert run(tensor_parallel_size=2) == expected
    assert LaterSum.computed > 0


def scored(**settings: Any) -> list[TokenDelta]:
    loop = engine(LLAMA | EVEN, **settings)
    params = SamplingParams(max_tokens=6, temperature=0, logprobs=3, prompt_logprobs=2)
    asked = [GenerateRequest(id=str(i), tokens=list(range(5 + i, 17)), params=params) for i in range(3)]
    found = list(drive(loop, asked))
    loop.close()
    return found


def test_log_probabilities() -> None:
    alone, divided = scored(), scored(tensor_parallel_size=2)
    assert len(alone) == len(divided)
    for one, other in zip(alone, divided, strict=True):
        assert (one.id, one.tokens) == (other.id, other.tokens)
        for mine, its in zip(scores_of(one), scores_of(other), strict=True):
            assert (mine.rank, mine.top_ids) == (its.rank, its.top_ids)
            assert [mine.logprob, *mine.top_logprobs] == pytest.approx([its.logprob, *its.top_logprobs], abs=1e-4)


def scores_of(delta: TokenDelta) -> list[TokenLogprobs]:
    return [one for one in [*(delta.prompt_logprobs or []), *(delta.logprobs or [])] if one is not None]


@pytest.mark.parametrize("tied", [False, True])
def test_ranks_exchange_only_the_tokens_that_may_be_drawn(tied: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    config = LLAMA | EVEN | {"tie_word_embeddings": tied}
    whole: list[int] = []
    gather = SharedMemory.all_gather

    def counted(group: SharedMemory, x: Tensor) -> Tensor:
        if x.dtype == torch.float32 and x.shape[-1] == EVEN["vocab_size"] // 2:
            whole.append(len(x))
        return gather(group, x)

    monkeypatch.setattr(SharedMemory, "all_gather", counted)
    drawn = [{}, {"temperature": 0.9, "top_k": 4, "seed": 3}, {"temperature": 1.2, "top_k": 20, "seed": 5}]
    asked = [
        GenerateRequest(
            id=str(i), tokens=[5, 6, 7 + i], params=SamplingParams(max_tokens=12, **{"temperature": 0} | drawn[i % 3])
        )
        for i in range(6)
    ]
    reported = SamplingParams(max_tokens=2, temperature=0, logprobs=1)
    alone = engine(config)
    expected = tokens_of(drive(alone, asked))
    alone.close()
    loop = engine(config, tensor_parallel_size=2, attention_backend="torch")
    assert tokens_of(drive(loop, asked)) == expected
    assert whole == []
    tokens_of(drive(loop, [GenerateRequest(id="reported", tokens=[5], params=reported)]))
    assert whole == [1] * 4  # on each rank, for each of its tokens
    loop.close()


def test_sleep_and_other_weights() -> None:
    where = {"device": "cpu", "cpu_bind": "nobind"}
    assert life(tensor_parallel_size=2, **where) == life(**where)
