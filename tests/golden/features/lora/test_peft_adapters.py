"""Adapters made by PEFT give PEFT's own logits (tests/data/peft/make.py made both). So does llama.cpp's form of one."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import pytest
import torch
from adapter_kit import ALL_FORMS_NIGHTLY, Adapted, load
from safetensors.torch import load_file
from tiny import make_checkpoint, model_files
from tiny_adapters import save_adapter
from torch import Tensor

from octavo.features.lora.activation import activated_at
from octavo.features.lora.checks import read_adapter
from octavo.features.lora.payload import LoraStep
from octavo.nn.attention.reference import ReferenceAttention

DATA = Path(__file__).parents[3] / "data" / "peft"
PROMPT = [5, 9, 33, 7, 40, 2, 18]
"""That of make.py."""


def logits_of(adapted: Adapted, adapter: Path, prompt: list[int], skipped: list[int] | None = None) -> Tensor:
    payload = adapted.enter(adapter)
    row = adapted.runner.row(prompt, len(prompt))
    step = LoraStep(payload.entries, [0], payload.general, skipped=skipped)
    return adapted.step([row], [len(prompt)], step, all_logits=True)


@ALL_FORMS_NIGHTLY
@pytest.mark.parametrize("name", ["patterns", "magnitudes", "tables", "tokens", "tied"])
def test_logits_are_those_of_peft(name: str, by_output: bool) -> None:
    base = DATA / ("base-tied" if name == "tied" else "base")
    found = logits_of(load(model_files(base), ReferenceAttention(), by_output=by_output), DATA / name, PROMPT)
    expected = load_file(DATA / "logits.safetensors")
    torch.testing.assert_close(found, expected[name], rtol=1e-4, atol=1e-4)
    others = [logits for one, logits in expected.items() if one != name and not one.startswith("added")]
    assert not any(torch.allclose(found, other, atol=0.1) for other in others)


def test_logits_of_an_activated_adapter_are_those_of_peft() -> None:
    """PEFT finds the invocation tokens 7, 40 at the position 3 of the prompt."""
    adapted = load(model_files(DATA / "base"), ReferenceAttention())
    invocation = read_adapter(DATA / "activated", adapted.worker._targets.targets, 64).manifest.invocation
    start = activated_at(invocation, PROMPT)
    assert (invocation, start) == ((7, 40), 3)
    found = logits_of(adapted, DATA / "activated", PROMPT, [start])
    expected = load_file(DATA / "logits.safetensors")["activated"]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    always = logits_of(load(model_files(DATA / "base"), ReferenceAttention()), DATA / "activated", PROMPT)
    assert not torch.allclose(always[-1], expected[-1], atol=0.1)


@pytest.mark.parametrize("name", ["added-rows", "added-saved"])
def test_logits_of_added_tokens_are_those_of_peft(name: str) -> None:
    """Adapters of a model that was resized from 48 to 51 tokens."""
    adapted = load(model_files(DATA / "base"), ReferenceAttention(), added_tokens=3)
    found = logits_of(adapted, DATA / name, [*PROMPT, 48, 49, 50])
    expected = load_file(DATA / "logits.safetensors")[name]
    assert found.shape == expected.shape == (len(PROMPT) + 3, 51)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def as_gguf(
    adapter: Path, path: Path, architecture: str, heads: dict[str, int], invocation: list[int] | None = None
) -> Path:
    """Write the adapter as llama.cpp's convert_lora_to_gguf.py does, which for Llama pairs adjacent channels of q and
    k."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", json.loads((adapter / "adapter_config.json").read_text())["lora_alpha"])
    if invocation is not None:
        writer.add_array("adapter.alora.invocation_tokens", invocation)
    for key, value in load_file(adapter / "adapter_model.safetensors").items():
        module, _, role = key.removeprefix("base_model.model.model.").removesuffix(".weight").rpartition(".lora_")
        if module == "embed_tokens":
            name, value = "token_embd", value.t() if role == "embedding_A" else value
        else:
            _, layer, inner = module.split(".", 2)
            name = f"blk.{layer}.{_NAMES[inner]}"
            count = heads.get(inner.rpartition(".")[2]) if architecture == "llama" else None
            if role == "B" and count:
                value = value.view(count, 2, -1, value.shape[1]).swapaxes(1, 2).reshape(value.shape)
        writer.add_tensor(f"{name}.weight.lora_{role[-1].lower()}", value.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@ALL_FORMS_NIGHTLY
@pytest.mark.parametrize(("family", "architecture"), [("llama", "llama"), ("qwen2", "qwen2")])
def test_llama_cpps_form_gives_the_same(family: str, architecture: str, by_output: bool, tmp_path: Path) -> None:
    config = make_checkpoint(family, tmp_path).config.to_dict()
    targets = ("q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "embed_tokens")
    adapter = save_adapter(tmp_path / "adapter", config, seed=3, rank=6, alpha=9, targets=targets)
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    written = as_gguf(adapter, tmp_path / "adapter.gguf", architecture, heads)
    files = model_files(tmp_path)
    found = [
        logits_of(load(files, ReferenceAttention(), by_output=by_output), one, PROMPT) for one in (adapter, written)
    ]
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-5)


def test_llama_cpps_form_has_the_invocation_tokens(tmp_path: Path) -> None:
    config = make_checkpoint("qwen2", tmp_path).config.to_dict()
    adapter = save_adapter(tmp_path / "adapter", config, seed=3, targets=("q_proj", "up_proj"))
    targets = load(model_files(tmp_path), ReferenceAttention()).worker._targets.targets
    for invocation in (None, [7, 40]):
        written = as_gguf(adapter, tmp_path / f"{invocation}.gguf", "qwen2", {}, invocation)
        assert read_adapter(written, targets, 64).manifest.invocation == tuple(invocation or ())
