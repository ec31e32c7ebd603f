"""With `--batch-invariant`, a request's log-probabilities are the same to the bit, whatever is computed beside it and
however its prompt is divided: in 16 bits, on a GPU if there is one, else by the CPU's kernels."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tiny import FAMILIES, make_checkpoint
from tiny import model_files as tiny_files
from tiny_families import DENSE
from toy_engine import GPU, drive, one_by_one, tiny_config
from toy_models import LLAMA, LLAMA_KV_BYTES_PER_TOKEN, VOCAB, model_files

from octavo.build import build_core
from octavo.core.errors import ConfigError
from octavo.core.output import TokenDelta
from octavo.core.params import SamplingParams
from octavo.core.request import GenerateRequest
from octavo.hub.files import ModelFiles

CONFIG = LLAMA | {"attention_bias": True} if GPU else LLAMA
SETTINGS: dict[str, Any] = {"dtype": "bfloat16", "batch_invariant": True}
WAYS: dict[str, dict[str, Any]] = {
    "together": {},
    "small chunks": {"max_num_batched_tokens": 8, "max_num_seqs": 8},
    "preemption": {"memory_bytes": 144 * LLAMA_KV_BYTES_PER_TOKEN, "max_model_len": 128},
    "eager": {"enforce_eager": True},
    "no prefix cache": {"enable_prefix_caching": False},
}


def requests() -> list[GenerateRequest]:
    rng = random.Random(7)
    prefix = [rng.randrange(4, VOCAB) for _ in range(40)]
    made = []
    for i in range(10):
        prompt = rng.choice([prefix, []]) + [rng.randrange(4, VOCAB) for _ in range(rng.randrange(1, 30))]
        sampled = {"temperature": 0.8, "seed": i} if i % 2 else {"temperature": 0}
        params = SamplingParams(max_tokens=rng.randrange(8, 40), ignore_eos=True, logprobs=3, **sampled)
        made.append(GenerateRequest(id=f"r{i}", tokens=prompt, params=params))
    return made


Answers = dict[str, list[tuple[int, Any]]]


def answers(news: list[TokenDelta]) -> Answers:
    found: Answers = {}
    for delta in news:
        assert delta.error is None, delta.error
        found.setdefault(delta.id, []).extend(zip(delta.tokens, delta.logprobs or [], strict=True))
    return found


def run(*, alone: bool = False, files: ModelFiles | None = None, **settings: Any) -> tuple[Answers, int]:
    loop, _ = build_core(tiny_config(**SETTINGS | settings), files or model_files(CONFIG))
    try:
        news = list(one_by_one(loop, requests()) if alone else drive(loop, requests()))
        return answers(news), loop.stats().num_preemptions
    finally:
        loop.close()


@cache
def truth() -> Answers:
    return run(alone=True, enable_prefix_caching=False, async_scheduling=False)[0]


@pytest.mark.parametrize("way", list(WAYS))
def test_bits_do_not_depend_on(way: str) -> None:
    found, preemptions = run(**WAYS[way])
    assert found == truth()
    assert (preemptions > 0) == (way == "preemption")


def test_encoders_are_refused(tmp_path: Path) -> None:
    files = model_files(LLAMA | {"architectures": ["BertModel"], "model_type": "bert"}, tmp_path)
    with pytest.raises(ConfigError, match="--batch-invariant: tiny is an encoder"):
        run(files=files)


@pytest.mark.features("speculation")
def test_bits_do_not_depend_on_drafts() -> None:
    lookup = {"method": "ngram", "num_speculative_tokens": 3, "adaptive": False, "prompt_lookup_min": 1}
    found, _ = run(speculative_config=lookup)
    assert found == truth()


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="test_native_families.py has the CPU's")
@pytest.mark.parametrize("family", [*FAMILIES, *DENSE])
def test_families(family: str, tmp_path: Path) -> None:
    make_checkpoint(family, tmp_path)
    files = tiny_files(tmp_path)
    settings = {"load_format": "auto", "files": files, "max_model_len": 112, "memory_bytes": 1 << 23}
    if "kv_lora_rank" in files.config:
        with pytest.raises(ConfigError, match="--batch-invariant: latent"):
            run(**settings)
        return
    alone, _ = run(**settings, alone=True, enable_prefix_caching=False)
    assert run(**settings)[0] == alone
    assert run(**settings, max_num_batched_tokens=16, max_num_seqs=8)[0] == alone


@pytest.mark.skipif(not GPU, reason="needs an NVIDIA GPU, whose other kernels depend on the batch")
def test_without_the_flag_some_bits_do() -> None:
    assert run(batch_invariant=False)[0] != run(batch_invariant=False, alone=True)[0]


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"tensor_parallel_size": 2, "device": "cpu"}, "--tensor-parallel-size"),
        ({"attention_backend": "reference"}, "reference"),
    ],
)
def test_what_depends_on_the_batch_is_refused(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named) as refused:
        run(**settings)
    assert "--batch-invariant" in str(refused.value)
