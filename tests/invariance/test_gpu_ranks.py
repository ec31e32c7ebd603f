"""Several GPUs give one GPU's tokens, with recorded steps and without: needs two NVIDIA GPUs, some tests four.

Logits are summed in another order than on one GPU, in float32, so tokens are compared, and log-probabilities nearly.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import math
import os
import random
import re
import signal
import subprocess
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import toy_tokenizers
from test_invariance import requests as varied_requests
from test_kinds_of_cache import KINDS
from test_kinds_of_cache import VOCAB as BYTES
from toy_engine import drive, tiny_config, tokens_of
from toy_models import LLAMA, VOCAB, model_files, save_decoder

from octavo import AsyncLLM
from octavo.build import build_core
from octavo.core.errors import DeviceLostError
from octavo.core.output import TokenDelta
from octavo.core.params import SamplingParams
from octavo.core.request import GenerateRequest
from octavo.core.structured import StructuredOutputsParams
from octavo.engine.loop import EngineLoop

Settings = dict[str, Any]

pytestmark = pytest.mark.gpu
GPUS = torch.cuda.device_count()
EVEN = {"vocab_size": VOCAB + 1}
LLAMAS: dict[str, Settings] = {
    "full": LLAMA | EVEN,
    "odd vocabulary": LLAMA,
    "tied": LLAMA | EVEN | {"tie_word_embeddings": True},
    "three layers": LLAMA | EVEN | {"num_hidden_layers": 3},
    "experts": LLAMA
    | EVEN
    | {"architectures": ["Qwen2MoeForCausalLM"], "num_experts": 5, "num_experts_per_tok": 2}
    | {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 48},
}
DEEP: Settings = {"n_routed_experts": 6, "n_shared_experts": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1}
DEEP |= {"moe_intermediate_size": 32, "n_group": 2, "topk_group": 1}
MODELS = LLAMAS | {name: LLAMA | EVEN | kind | {"model_type": "any"} for name, kind in KINDS.items()}
MODELS["latent experts"] = MODELS["latent"] | DEEP | {"architectures": ["DeepseekV3ForCausalLM"]}
TP: Settings = {"tensor_parallel_size": 2}
PP: Settings = {"pipeline_parallel_size": 2}
DP: Settings = {"data_parallel_size": 2, "enable_expert_parallel": True}
PROMPTS: Settings = {"prefill_context_parallel_size": 2, "prefill_context_parallel_threshold": 8}
PROMPTS |= {"enforce_eager": True}  # steps as short as these are recorded otherwise, and then not divided
DIVISIONS: dict[str, Settings] = {
    "TP 2": TP,
    "PP 2": PP,
    "EP 2": TP | {"enable_expert_parallel": True},
    "TP 2, steps in parts": TP | {"enable_dbo": True, "dbo_prefill_token_threshold": 32, "enforce_eager": True},
    "EP 2, rows": TP | {"enable_expert_parallel": True, "all2all_backend": "all_to_all"},
    "DP 2 with EP": DP,
    "DP 2 with EP, rows": DP | {"all2all_backend": "all_to_all"},
    "prompts over 2": PROMPTS,
    "prompts over 2 x TP 2": PROMPTS | TP,
    "TP 4": {"tensor_parallel_size": 4},
    "PP 3": {"pipeline_parallel_size": 3},
    "TP 2 x PP 2": TP | PP,
}
CASES = [
    *(("TP 2", name) for name in MODELS),
    *(("PP 2", name) for name in MODELS if name != "odd vocabulary"),
    *(("EP 2", name) for name in ("experts", "windows and sinks", "chunks")),
    ("EP 2, rows", "experts"),
    *(("DP 2 with EP", name) for name in ("experts", "windows and sinks", "latent experts")),
    ("DP 2 with EP, rows", "latent experts"),
    ("TP 2, steps in parts", "full"),
    ("TP 2, steps in parts", "latent"),
    *(("prompts over 2", name) for name in ("full", "windows", "latent", "windows and sinks", "experts")),
    ("prompts over 2 x TP 2", "full"),
    ("TP 4", "full"),
    ("TP 4", "windows"),
    ("PP 3", "three layers"),
    ("TP 2 x PP 2", "full"),
    ("TP 2 x PP 2", "windows"),
]
CROWDED: Settings = {"async_scheduling": True, "max_num_batched_tokens": 16, "max_num_seqs": 8, "max_model_len": 160}
SETTINGS: dict[str, Settings] = {
    "eager": {"enforce_eager": True},
    "in step": {"async_scheduling": False},
    "eager and in step": {"enforce_eager": True, "async_scheduling": False},
    "chunks and preemption": CROWDED | {"num_blocks": 16},
    "no prefix cache": {"enable_prefix_caching": False},
    "no common prefixes": {"disable_cascade_attn": True},
    "FP8 keys and values": {"kv_cache_dtype": "fp8_e5m2"},
}


def needs(gpus: int) -> None:
    """Skip a test on a machine with fewer GPUs."""
    if gpus > GPUS:
        pytest.skip(f"needs {gpus} NVIDIA GPUs, and there are {GPUS}")


def size_of(division: Settings) -> int:
    return math.prod(size for name, size in division.items() if name.endswith("_parallel_size"))


def engine(config: Settings, folder: Path = Path("tiny"), **settings: Any) -> EngineLoop:
    return build_core(tiny_config(device="cuda", **settings), model_files(config, folder))[0]


@functools.cache
def alone(model: str, setting: str = "") -> dict[tuple[str, int], list[int]]:
    """One GPU's tokens, computed once for all divisions."""
    return tokens(MODELS[model], **SETTINGS.get(setting, {}))


def tokens(config: Settings, **settings: Any) -> dict[tuple[str, int], list[int]]:
    """Of greedy, seeded and penalized requests, some with common beginnings."""
    loop = engine(config, **settings)
    found = tokens_of(drive(loop, varied_requests()))
    loop.close()
    return found


@pytest.mark.parametrize(("division", "model"), CASES)
def test_tokens_of_each_model(division: str, model: str) -> None:
    needs(size_of(DIVISIONS[division]))
    assert tokens(MODELS[model], **DIVISIONS[division]) == alone(model)


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("division", ["TP 2", "PP 2"])
def test_tokens_under_each_setting(division: str, setting: str) -> None:
    needs(2)
    assert tokens(MODELS["full"], **DIVISIONS[division], **SETTINGS[setting]) == alone("full", setting)


@pytest.mark.parametrize(
    ("division", "model", "setting"),
    [
        ("TP 2", "full", ""),
        ("TP 2", "full", "eager"),
        ("TP 2, steps in parts", "full", ""),
        ("prompts over 2", "full", ""),
        ("prompts over 2", "latent", ""),
        ("prompts over 2", "latent", "chunks and preemption"),
        ("DP 2 with EP", "experts", ""),
        ("DP 2 with EP", "latent experts", "chunks and preemption"),
    ],
    ids=str,
)
def test_two_ranks_on_one_gpu(division: str, model: str, setting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that two GPUs do but NCCL: plans, shares, and sums in each other's memory, recorded and fused with norms."""
    needs(1)
    expected = alone(model, setting)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,0")
    assert tokens(MODELS[model], **DIVISIONS[division], **SETTINGS.get(setting, {})) == expected


@pytest.mark.parametrize(
    ("model", "setting"),
    [
        ("experts", ""),
        ("experts", "chunks and preemption"),
        ("latent experts", "chunks and preemption"),
        ("windows and sinks", ""),
    ],
)
@pytest.mark.parametrize("gpus", [1, 2])
def test_requests_divided_over_ranks_are_decoded_by_graphs(
    model: str,
    gpus: int,
    setting: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Two ranks share a GPU, or exchange rows through NCCL, too. All replay the same steps."""
    needs(gpus)
    expected = alone(model, setting)
    if gpus == 1:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,0")
    caplog.set_level(logging.DEBUG)  # of the ranks, too
    capsys.readouterr()
    assert tokens(MODELS[model], **DP, **SETTINGS.get(setting, {})) == expected
    counts = [int(count) for count in re.findall(r"replayed (\d+) steps", capsys.readouterr().err)]
    assert len(counts) == 2
    assert counts[0] == counts[1] > 20


def scored(**settings: Any) -> dict[str, TokenDelta]:
    """Log-probabilities of prompts and of one token; deltas of a pipeline come in another order."""
    loop = engine(MODELS["full"], **settings)
    params = SamplingParams(max_tokens=1, temperature=0, logprobs=3, prompt_logprobs=2)
    asked = [GenerateRequest(id=str(i), tokens=list(range(5 + i, 17)), params=params) for i in range(3)]
    found = {delta.id: delta for delta in drive(loop, asked)}
    loop.close()
    return found


@pytest.mark.parametrize("division", ["TP 2", "PP 2"])
def test_log_probabilities(division: str) -> None:
    needs(2)
    expected, found = scored(), scored(**DIVISIONS[division])
    assert found.keys() == expected.keys()
    for name, delta in found.items():
        mine, its = (
            [one for one in [*(each.prompt_logprobs or []), *(each.logprobs or [])] if one is not None]
            for each in (delta, expected[name])
        )
        assert [one.top_ids for one in mine] == [one.top_ids for one in its]
        assert [one.logprob for one in mine] == pytest.approx([one.logprob for one in its], abs=1e-4)


def under_grammars(folder: Path, **settings: Any) -> dict[tuple[str, int], list[int]]:
    loop = engine(LLAMA | {"vocab_size": BYTES, "eos_token_id": 2}, folder, **settings)
    asked = []
    for i, pattern in enumerate(["[a-f]{20,40}", r"(\d+, ){3,6}", "(yes|no|a rather long choice)"] * 2):
        params = SamplingParams(max_tokens=24, temperature=0.9 * (i % 2), seed=i)
        option = msgspec.Raw(msgspec.msgpack.encode(StructuredOutputsParams(regex=pattern)))
        asked.append(GenerateRequest(id=str(i), tokens=[10 + i, 20, 30], params=params, options={"grammar": option}))
    found = tokens_of(drive(loop, asked))
    loop.close()
    return found


@pytest.mark.features("grammar")
@pytest.mark.parametrize("division", ["TP 2", "PP 2"])
def test_tokens_under_grammars(division: str, tmp_path: Path) -> None:
    needs(2)
    toy_tokenizers.byte_level().save(str(tmp_path / "tokenizer.json"))
    assert under_grammars(tmp_path, **DIVISIONS[division]) == under_grammars(tmp_path)


def with_adapters(adapters: dict[str, Path], **settings: Any) -> dict[tuple[str, int], list[int]]:
    from octavo.features.lora.payload import NAME
    from octavo.features.lora.requests import Part, encode

    modules = tuple(f"{name}={path}" for name, path in adapters.items())
    loop = engine(MODELS["full"], lora_modules=modules, **settings)
    params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    choices = [{}, *({NAME: encode((Part(name, 1.0),))} for name in adapters)]
    asked = [
        GenerateRequest(id=str(i), tokens=list(range(5 + i, 20)), params=params, options=choices[i % len(choices)])
        for i in range(6)
    ]
    found = tokens_of(drive(loop, asked))
    loop.close()
    return found


@pytest.mark.features("lora")
def test_tokens_with_adapters(tmp_path: Path) -> None:
    needs(2)
    from tiny_adapters import save_adapter

    adapters = {name: save_adapter(tmp_path / name, MODELS["full"], seed=i, rank=4) for i, name in enumerate("ab")}
    expected = with_adapters(adapters)
    assert len({tuple(one) for one in expected.values()}) > 3, "adapters change tokens"
    assert with_adapters(adapters, **TP) == expected


@pytest.mark.features("speculation")
def test_tokens_with_drafts() -> None:
    needs(2)
    drafts = {"spec_tokens": 3}
    repeated = [[4, 5, 6, 7] * 6, [9, 8] * 10]
    params = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
    asked = [GenerateRequest(id=str(i), tokens=prompt, params=params) for i, prompt in enumerate(repeated)]
    found = []
    for settings in ({}, drafts, drafts | TP):
        loop = engine(MODELS["full"], **settings)
        found.append(tokens_of(drive(loop, asked)))
        loop.close()
    assert found[1] == found[0]
    assert found[2] == found[0]


@pytest.mark.features("speculation")
@pytest.mark.parametrize("way", ["model", "head", "tree"])
def test_tokens_with_a_companions_drafts(way: str, tmp_path: Path) -> None:
    """A model that drafts for itself is always right, so each rank has the part of its cache that is its own."""
    needs(2)
    from draft_models import folder_of

    config = MODELS["full"]
    drafts: Settings = {"method": "draft_model", "model": folder_of(config, tmp_path / "x"), "adaptive": False}
    if way != "model":
        drafts |= {"method": "eagle", "model": folder_of(config | {"num_hidden_layers": 1}, tmp_path / "x")}
    shape: Settings = {"num_speculative_tokens": 3}
    if way == "tree":
        shape = {"speculative_token_tree": [(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0)]}
    params = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
    asked = [GenerateRequest(id=str(i), tokens=[5 + i] * (7 + i), params=params) for i in range(3)]
    found = []
    for settings in ({}, {"speculative_config": drafts | shape}, {"speculative_config": drafts | shape} | TP):
        loop = engine(config, **settings)
        found.append(tokens_of(drive(loop, asked)))
        counts = {one.name: sum(one.values.values()) for one in loop.stats().features}
        if way == "model" and settings:
            assert counts["spec_decode_num_accepted_tokens"] > 0.9 * counts["spec_decode_num_draft_tokens"]
        loop.close()
    assert found[1] == found[0]
    assert found[2] == found[0]


def test_two_replicas(tmp_path: Path) -> None:
    needs(2)
    model = str(save_decoder(tmp_path, seed=1))
    settings: Settings = {"kv_cache_memory_bytes": 1 << 24, "device": "cuda", "dtype": "float32", "max_num_seqs": 16}
    rng = random.Random(3)
    prompts = [[rng.randrange(4, 390) for _ in range(9 + i)] for i in range(8)]

    async def answers(**more: Any) -> list[list[int]]:
        async with await AsyncLLM.start(model, **settings, **more) as llm:

            async def one(number: int) -> list[int]:
                params = SamplingParams(max_tokens=16, temperature=0, ignore_eos=True)
                prompt: Any = {"prompt_token_ids": prompts[number]}
                found = [output async for output in llm.generate(prompt, params, request_id=str(number))]
                return list(found[-1].outputs[0].token_ids)

            return await asyncio.gather(*map(one, range(len(prompts))))

    assert asyncio.run(answers(data_parallel_size=2)) == asyncio.run(answers())


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_lost_rank_leaves_no_process_and_no_memory(number: int, rank: int) -> None:
    needs(2)
    loop = engine(MODELS["full"], **TP)
    ranks = loop.worker.ranks  # type: ignore[attr-defined]
    pids = [process.pid for process in ranks.processes]
    params = SamplingParams(max_tokens=200, temperature=0, ignore_eos=True)
    for i in range(8):
        loop.add(GenerateRequest(id=str(i), tokens=list(range(5 + i, 17)), params=params))
    for _ in range(4):
        loop.step()
    os.kill(pids[rank], number)
    with pytest.raises(DeviceLostError, match=rf"rank {rank} \("):
        tokens_of(drive(loop, []))
    assert all(process.code is not None for process in ranks.processes)
    query = ["nvidia-smi", "--query-compute-apps=pid", "--format=csv,noheader"]
    on_gpus = subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()
    assert not {str(pid) for pid in pids} & set(on_gpus)
