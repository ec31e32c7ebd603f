"""Vectors of prompts with adapters are those of the merged weights, also beside prompts of the base model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file, save_file
from tiny import make_checkpoint
from tiny_adapters import merged, save_adapter

from octavo import LLM, LoRARequest

BACKENDS = ("torch", "native")
PROMPTS = [[5, 9, 33, 7, 40, 2, 18], list(range(20, 60)), [8, 1], [7] * 30]
SETTINGS: dict[str, Any] = {"dtype": "float32", "kv_cache_memory_bytes": 4 << 20, "threads": 1, "max_model_len": 128}
SETTINGS |= {"skip_tokenizer_init": True, "max_num_batched_tokens": 24}


def vectors(folder: Path, pooling: str, prompts: list[list[int]], *adapters: Any, **settings: Any) -> list[np.ndarray]:
    config = {"pooling_type": pooling, "normalize": False}
    with LLM(str(folder), pooler_config=config, **SETTINGS, **settings) as llm:
        given = {"lora_request": list(adapters)} if adapters else {}
        return [np.array(one.outputs.embedding) for one in llm.embed(prompts, **given)]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("pooling", ["MEAN", "LAST"])
def test_vectors_are_those_of_merged_weights(pooling: str, backend: str, tmp_path: Path) -> None:
    make_checkpoint("llama", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    expected = vectors(tmp_path, pooling, PROMPTS[:1])
    requests: list[Any] = [None]
    for number, rank in ((1, 4), (2, 16)):
        folder = save_adapter(tmp_path / f"adapter{number}", config, seed=number, rank=rank)
        requests.append(LoRARequest(f"adapter{number}", number, str(folder)))
        plain = tmp_path / f"merged{number}"
        plain.mkdir()
        save_file(merged(load_file(tmp_path / "model.safetensors"), folder), plain / "model.safetensors")
        (plain / "config.json").write_text(json.dumps(config))
        expected += vectors(plain, pooling, PROMPTS[number : number + 1])
    where: dict[str, Any] = {"device": "cpu", "attention_backend": backend, "enable_lora": True}
    found = vectors(tmp_path, pooling, PROMPTS[:3], *requests, **where)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-4, rtol=1e-4)
    alike = vectors(tmp_path, pooling, [PROMPTS[0]] * 2, None, requests[1], **where)
    assert np.abs(alike[0] - alike[1]).max() > 0.05
