"""Weights that come from the host's memory step by step, on a GPU with the whole engine around it: the tokens of the
engine whose weights are resident."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from test_gpu_families import generated
from tiny import make_checkpoint, model_files

from octavo import LLM, SamplingParams

FREED = 1 / 2**30
"""GiB: one byte, for which three layers leave the device."""

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


@pytest.mark.parametrize("eager", [True, False], ids=["eager", "recorded"])
@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {"num_hidden_layers": 7}),
        ("gemma3", {}),
        ("llama4", {}),
        ("jamba", {}),
        ("qwen3-moe", {"num_hidden_layers": 4}),
        ("deepseek-v3", {"num_hidden_layers": 4}),
    ],
)
def test_greedy_tokens(family: str, changes: dict[str, Any], eager: bool, tmp_path: Path) -> None:
    make_checkpoint(family, tmp_path, changes)
    files = model_files(tmp_path)
    expected = generated(files, device="cuda", enforce_eager=eager)
    assert generated(files, device="cuda", enforce_eager=eager, cpu_offload_gb=FREED) == expected


@pytest.mark.parametrize("quantization", [None, "fp8", "w8a8", "w8a16", "w4a16"])
@pytest.mark.parametrize("family", ["llama", "qwen3-moe"])
def test_all_forms_of_weights(family: str, quantization: str | None, tmp_path: Path) -> None:
    """Also after a sleep, in which the rooms lose their memory."""
    wide = {"hidden_size": 256, "intermediate_size": 256, "moe_intermediate_size": 128, "num_hidden_layers": 4}
    make_checkpoint(family, tmp_path, wide)
    found = []
    for freed in (0.0, FREED):
        llm = LLM(
            str(tmp_path),
            skip_tokenizer_init=True,
            hf_overrides={"dtype": "bfloat16"},
            quantization=quantization,
            cpu_offload_gb=freed,
            kv_cache_memory_bytes=1 << 26,
            enable_sleep_mode=True,
        )
        prompts = [[1 + 7 * i % 190 for i in range(n)] for n in (5, 60, 100)]
        params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, detokenize=False)
        found.append([one.outputs[0].token_ids for one in llm.generate(prompts, params)])
        llm.sleep()
        llm.wake_up()
        found.append([one.outputs[0].token_ids for one in llm.generate(prompts, params)])
        llm.close()
    assert all(one == found[0] for one in found)
