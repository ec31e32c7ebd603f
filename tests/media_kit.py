"""Runs of the invariance tests of images and of audio."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from octavo import LLM, SamplingParams

BASE: dict[str, Any] = {
    "dtype": "float32",
    "kv_cache_memory_bytes": 2 << 20,
    "threads": 1,
    "max_model_len": 256,
    "block_size": 16,
    "max_num_seqs": 8,
}


def answers(folder: Path, prompts: Sequence[Any], **settings: Any) -> tuple[list[list[list[int]]], int]:
    """Each choice's tokens, twice the same, and how many requests were preempted."""
    greedy = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    drawn = greedy.replace(temperature=1.0, seed=5, n=2)
    params = [drawn if i % 4 == 3 else greedy for i in range(len(prompts))]
    with LLM(str(folder), **BASE | settings) as llm:
        found = llm.generate(list(prompts), params)
        again = llm.generate(list(prompts)[::-1], params[::-1])[::-1]
        tokens = [[list(choice.token_ids) for choice in output.outputs] for output in found]
        assert tokens == [[list(choice.token_ids) for choice in output.outputs] for output in again]
        return tokens, llm.stats().num_preemptions


def answers_alone(folder: Path, prompts: Sequence[Any], device: str) -> list[list[list[int]]]:
    """The tokens of each request alone, and without a cache of prefixes. Devices draw differently."""
    return answers(folder, prompts, max_num_seqs=1, enable_prefix_caching=False, device=device)[0]
