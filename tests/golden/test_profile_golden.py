"""Profiles of a real engine: torch's operations and the native program's kernels, within the steps that ran them."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import toy_tokenizers
import transformers
from rank_kit import TWO_RANKS, ranks_in_threads

from octavo import LLM, SamplingParams
from octavo.core.errors import EngineStateError

VOCAB = 464
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
PROMPTS = [{"prompt_token_ids": [5, 6, 7, 8]}, {"prompt_token_ids": [9, 10]}]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=112,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
    )
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    toy_tokenizers.byte_level().save(str(folder / "tokenizer.json"))
    return folder


@pytest.mark.parametrize("backend", ["native", "torch"])
def test_where_the_time_went(model: Path, tmp_path: Path, backend: str) -> None:
    profiler = {"profiler": "torch", "torch_profiler_dir": str(tmp_path)}
    where = {"attention_backend": backend, "device": "cpu"}
    with LLM(str(model), **where, kv_cache_memory_bytes=1 << 20, profiler_config=profiler) as llm:
        before = tokens(llm)
        llm.start_profile()
        during = tokens(llm)
        trace = llm.stop_profile()
        assert before == during == tokens(llm)

    with gzip.open(trace, "rt") as file:
        events: list[dict[str, Any]] = json.load(file)["traceEvents"]
    steps = [one for one in events if one["name"] == "step"]
    assert len(steps) == 6
    operations = [one for one in events if one.get("cat") == "cpu_op"]
    kernels = [one for one in events if one.get("cat") == "octavo" and one["tid"] == 2]
    assert operations
    assert all(any(lies_within(one, step) for step in steps) for one in operations + kernels)
    counts = Counter(one["name"] for one in kernels)
    if backend == "torch":
        assert not counts
    else:
        each = {"embed": 1, "norm": 2 * 2 + 1, "linear": 4 * 2 + 1, "rope": 2, "attend": 2, "merge": 2}
        assert counts == {name: 6 * count for name, count in each.items()}
        assert sum(one["args"] == {"rows": VOCAB, "columns": 64, "dtype": "float"} for one in kernels) == 6


def test_where_the_time_went_in_a_rank(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The trace has the operations and the kernels of the rank that samples."""
    ranks_in_threads(monkeypatch)
    profiler = {"profiler": "torch", "torch_profiler_dir": str(tmp_path)}
    with LLM(str(model), **TWO_RANKS, threads=1, kv_cache_memory_bytes=1 << 20, profiler_config=profiler) as llm:
        before = tokens(llm)
        llm.start_profile()
        assert tokens(llm) == before
        trace = llm.stop_profile()
        assert list(tmp_path.iterdir()) == [Path(trace)]
    with gzip.open(trace, "rt") as file:
        events: list[dict[str, Any]] = json.load(file)["traceEvents"]
    kernels = Counter(one["name"] for one in events if one.get("cat") == "octavo" and one["tid"] == 2)
    assert kernels["attend"] == 6 * 2, "two layers in each of 6 steps"
    assert any(one.get("cat") == "cpu_op" for one in events)


def test_a_rank_that_can_not_reach_the_folder_says_so(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one on another machine; the engine goes on."""
    ranks_in_threads(monkeypatch)
    profiler = {"profiler": "torch", "torch_profiler_dir": str(tmp_path / "mine")}
    with LLM(str(model), **TWO_RANKS, threads=1, kv_cache_memory_bytes=1 << 20, profiler_config=profiler) as llm:
        (tmp_path / "mine").rmdir()
        with monkeypatch.context() as patched:
            patched.setattr(Path, "mkdir", lambda *_, **__: None)
            with pytest.raises(EngineStateError, match=r"on a machine without the folder .*/mine"):
                llm.start_profile()
        assert len(tokens(llm)) == len(PROMPTS)
        llm.start_profile()
        assert llm.stop_profile()


def tokens(llm: LLM) -> list[list[int]]:
    llm.reset_prefix_cache()
    return [list(one.outputs[0].token_ids) for one in llm.generate(PROMPTS, GREEDY)]


def lies_within(inner: dict[str, Any], outer: dict[str, Any]) -> bool:
    """Up to a microsecond, for the two clocks are not read at one moment."""
    return outer["ts"] - 1 <= inner["ts"] and inner["ts"] + inner["dur"] <= outer["ts"] + outer["dur"] + 1
