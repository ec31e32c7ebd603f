"""Blocks of adapters come back to their own requests only."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from tiny_adapters import save_adapter
from toy_models import save_decoder

from octavo import LLM, LoRARequest, SamplingParams

pytestmark = pytest.mark.features("lora")


def answers(base: Path, adapters: list[Path], **settings: Any) -> tuple[list[list[int]], int]:
    """Return the answers to equal prompts with different adapters, in turns, and how many blocks were loaded."""
    llm = LLM(str(base), enable_lora=True, dtype="float32", max_model_len=128, max_num_seqs=2, **settings)
    params = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
    found = []
    for turn in range(2):
        for number, adapter in enumerate([None, *adapters]):
            rng = random.Random(0)
            prompt = [rng.randrange(4, 500) for _ in range(60 + 8 * turn)]
            chosen = None if adapter is None else LoRARequest(f"a{number}", number, str(adapter))
            outputs = llm.generate({"prompt_token_ids": prompt}, params, lora_request=chosen, use_tqdm=False)
            found.append([*outputs[0].outputs[0].token_ids])
    loaded = llm.stats().blocks_loaded
    llm.close()
    return found, loaded


def test_blocks_of_adapters(tmp_path: Path) -> None:
    base = save_decoder(tmp_path / "base", seed=3, vocab_size=512)
    config = json.loads((base / "config.json").read_text())
    adapters = [save_adapter(tmp_path / f"a{i}", config, seed=i, rank=8) for i in range(4)]
    small = {"kv_cache_memory_bytes": 400_000, "threads": 1}
    expected, _ = answers(base, adapters, **small)
    got, loaded = answers(base, adapters, **small, kv_offloading_size=0.01)
    assert got == expected
    assert loaded > 0
    assert len({tuple(one) for one in got[:5]}) > 2
