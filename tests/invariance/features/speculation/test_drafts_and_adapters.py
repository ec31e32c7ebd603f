"""Drafts change nothing for requests with adapters: the model with its adapter decides, whatever drafts without one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny import make_checkpoint, model_files
from toy_drafter import check_same, news_of
from toy_engine import drive, tiny_config

from octavo.build import build_core
from octavo.core.params import SamplingParams
from octavo.core.request import GenerateRequest
from octavo.hub.files import ModelFiles

SEARCHES = ("ngram", "suffix")
HEADS: dict[str, dict[str, Any]] = {
    "draft_model": {},
    "eagle": {"num_hidden_layers": 1},
    "eagle3": {"num_hidden_layers": 1, "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}},
    "medusa": {"medusa_num_heads": 2},
}


def check_adapters(files: ModelFiles, adapter: Path, backend: str, own: dict[str, Any]) -> None:
    """Compare an engine that drafts with one that does not. Every other request has the adapter; weights are random."""
    from octavo.features.lora.payload import NAME
    from octavo.features.lora.requests import Part, encode

    settings: dict[str, Any] = {"load_format": "dummy", "attention_backend": backend, "max_num_batched_tokens": 12}
    settings["lora_modules"] = (f"a={adapter}",)
    files = ModelFiles(name="x", path=files.path, format="safetensors", weights=(), config=files.config)
    params = SamplingParams(max_tokens=14, temperature=0, ignore_eos=True)
    adapted = {NAME: encode((Part("a", 1.0),))}
    asked = [
        GenerateRequest(id=str(n), tokens=list(range(3, 9 + 4 * n)), params=params, options=adapted if n % 2 else {})
        for n in range(4)
    ]
    plain = build_core(tiny_config(**settings), files)[0]
    expected = news_of(list(drive(plain, asked)))
    own = {"num_speculative_tokens": 3, "adaptive": False, **own}
    loop = build_core(tiny_config(**settings, speculative_config=own), files)[0]
    check_same(news_of(list(drive(loop, asked))), expected)
    assert expected["0", 0] != expected["1", 0]
    counts = {one.name: sum(one.values.values()) for one in loop.stats().features}
    assert counts["spec_decode_num_draft_tokens"] > 10
    plain.close()
    loop.close()


@pytest.mark.features("lora")
@pytest.mark.parametrize("backend", ["torch", "native"])
@pytest.mark.parametrize("method", [*SEARCHES, *HEADS])
def test_adapters_beside_drafts(method: str, backend: str, tmp_path: Path) -> None:
    from tiny_adapters import save_adapter

    make_checkpoint("llama", tmp_path / "model")
    files = model_files(tmp_path / "model")
    adapter = save_adapter(tmp_path / "adapter", files.config, seed=1, rank=4)
    own: dict[str, Any] = {"method": method}
    if method in SEARCHES:
        own["prompt_lookup_min"] = 1
    else:
        (tmp_path / "drafts").mkdir()
        (tmp_path / "drafts" / "config.json").write_text(json.dumps(files.config | HEADS[method]))
        own["model"] = str(tmp_path / "drafts")
        if method in ("eagle", "eagle3"):
            own["prompt_lookup_min"] = 0
    check_adapters(files, adapter, backend, own)


@pytest.mark.features("lora")
def test_adapters_beside_the_model_s_own_layer_that_drafts(tmp_path: Path) -> None:
    import tiny_families
    from tiny_adapters import ATTENTION, save_adapter

    kind, settings = tiny_families.MOE["glm4-moe"]
    sizes = {"vocab_size": 97, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    config = kind(**{**sizes, **settings, "num_hidden_layers": 2}).to_dict()
    config |= {"architectures": ["Glm4MoeForCausalLM"], "num_nextn_predict_layers": 1}
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    files = ModelFiles(name="x", path=tmp_path / "model", format="safetensors", weights=(), config=config)
    adapter = save_adapter(tmp_path / "adapter", config, seed=1, rank=4, targets=ATTENTION, strength=2.0)
    check_adapters(files, adapter, "torch", {"method": "mtp", "prompt_lookup_min": 0})
