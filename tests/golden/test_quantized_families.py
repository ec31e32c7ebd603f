"""Quantized checkpoints of families whose unquantized ones are arranged otherwise."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from quantized_kit import EXAMPLES
from safetensors.torch import load_file, save_file
from test_quantized_golden import PROMPT, logits_of
from tiny import load_model, make_checkpoint, model_files
from torch import Tensor

from octavo.core.errors import ModelFileError
from octavo.models.native import NativeDecoder
from octavo.native.program import Pool
from octavo.nn.attention.native import NativeAttention
from octavo.nn.attention.reference import ReferenceAttention
from octavo.nn.quant.blocks import BlockQuantized

Weights = dict[str, Tensor]


def one_by_one(weights: Weights) -> Weights:
    """Llama 4's experts as llm-compressor stores them."""
    found: Weights = {}
    for name, tensor in weights.items():
        base, _, kind = name.rpartition(".")
        if not base.endswith(".experts"):
            found[name] = tensor
            continue
        names = ("gate_proj", "up_proj") if kind == "gate_up_proj" else ("down_proj",)
        for expert, matrix in enumerate(tensor):
            parts = matrix.T.chunk(len(names))
            found |= {f"{base}.{expert}.{one}.weight": part for one, part in zip(names, parts, strict=True)}
    return found


def rows_first(weights: Weights) -> Weights:
    """GPT-2's matrices as quantizing tools store them."""
    kept = ("wte.weight", "wpe.weight")
    return {
        name: tensor.T if tensor.dim() == 2 and not name.endswith(kept) else tensor for name, tensor in weights.items()
    }


@pytest.mark.parametrize(
    ("family", "name", "stored", "picks"),
    [
        ("llama4", "fp8-compressed", one_by_one, ".experts."),
        ("gpt2", "gptq-4", rows_first, ".h."),
        ("gpt2", "bnb-int8", rows_first, ".h."),
        ("gpt2", "bnb-nf4", rows_first, ".mlp."),
    ],
)
def test_quantized_matrices_have_another_arrangement(
    family: str, name: str, stored: Callable[[Weights], Weights], picks: str, tmp_path: Path
) -> None:
    """In a native program, too; it rounds activations. What is not quantized is arranged as ever."""
    theirs = make_checkpoint(family, tmp_path)
    exact = quantize(tmp_path, name, stored, picks)
    arranged = stored(dict(theirs.state_dict()))
    with torch.no_grad():
        for key, values in exact.items():
            arranged[key].copy_(values)  # a view of the model's own
        expected = theirs(torch.tensor([PROMPT]), use_cache=False).logits[0]
    files = model_files(tmp_path)
    torch.testing.assert_close(logits_of(load_model(files, ReferenceAttention())), expected, rtol=1e-4, atol=1e-4)
    attention = NativeAttention(Pool(1))
    native = NativeDecoder(load_model(files, attention, scheme=BlockQuantized), attention.pool)
    torch.testing.assert_close(logits_of(native), expected, rtol=2e-2, atol=2e-2)


def quantize(folder: Path, name: str, stored: Callable[[Weights], Weights], picks: str) -> Weights:
    """Rewrite a checkpoint with its matrices arranged by `stored`, those quantized whose names contain `picks`; return
    the values of these."""
    example, plain = EXAMPLES[name], load_file(folder / "model.safetensors")
    weights, exact = dict(plain), {}
    for key, tensor in stored(plain).items():
        if picks not in key:
            continue
        weights.pop(key, None)
        if tensor.dim() != 2:
            weights[key] = tensor
            continue
        parts, exact[key] = example.write(tensor.float().contiguous())
        weights |= {f"{key.removesuffix('weight')}{suffix}": part.contiguous() for suffix, part in parts.items()}
    for key in plain.keys() - stored(plain).keys():
        del weights[key]
    save_file(weights, folder / "model.safetensors")
    settings(folder, EXAMPLES[name].settings)
    return exact


def test_ministral_3_as_published(tmp_path: Path) -> None:
    """In E4M3, with a scale per matrix under the name of tiles', as the text half of a model with images."""
    theirs = make_checkpoint("ministral3", tmp_path)
    exact = quantize(tmp_path, "fp8-static", dict, "_proj.")
    names = {"weight_scale": "weight_scale_inv", "input_scale": "activation_scale"}
    weights = {f"language_model.{name}": tensor for name, tensor in load_file(tmp_path / "model.safetensors").items()}
    for name in [name for name in weights if name.endswith(tuple(names))]:
        base, _, suffix = name.rpartition(".")
        weights[f"{base}.{names[suffix]}"] = weights.pop(name).bfloat16()
        if suffix == "weight_scale":
            key = name.removeprefix("language_model.").removesuffix("_scale")
            exact[key] = weights[f"{base}.weight"].double() * weights[f"{base}.weight_scale_inv"].double()
    save_file(weights, tmp_path / "model.safetensors")
    settings(tmp_path, {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None})
    config = json.loads((tmp_path / "config.json").read_text())
    outer = {"architectures": ["Mistral3ForConditionalGeneration"], "text_config": config}
    (tmp_path / "config.json").write_text(json.dumps(outer | {"quantization_config": config["quantization_config"]}))
    with torch.no_grad():
        for key, values in exact.items():
            theirs.get_parameter(key).copy_(values)
        expected = theirs(torch.tensor([PROMPT]), use_cache=False).logits[0]
    logits = logits_of(load_model(model_files(tmp_path), ReferenceAttention()))
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


def test_minimax_m2_as_published(tmp_path: Path) -> None:
    """Experts in E4M3 under names of their own, with a scale per tile."""
    make_checkpoint("minimax-m2", tmp_path)
    path = tmp_path / "model.safetensors"
    plain = load_file(path)
    exact = quantize(tmp_path, "fp8-tiles", dict, ".experts.")
    assert len(exact) == 2 * 6 * 3
    found = logits_of(load_model(model_files(tmp_path), ReferenceAttention()))
    save_file(plain | {name: values.float() for name, values in exact.items()}, path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": None}))
    expected = logits_of(load_model(model_files(tmp_path), ReferenceAttention()))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def settings(folder: Path, quantization: dict[str, Any]) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": quantization}))


def test_experts_of_8_bits_in_one_tensor_are_refused(tmp_path: Path) -> None:
    make_checkpoint("llama4", tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    name = next(name for name in weights if name.endswith("experts.gate_up_proj"))
    save_file(weights | {name: weights[name].to(torch.float8_e4m3fn)}, tmp_path / "model.safetensors")
    settings(tmp_path, EXAMPLES["fp8-modelopt"].settings)
    with pytest.raises(ModelFileError, match=rf"{name} in .* each expert's matrices as tensors of their own"):
        load_model(model_files(tmp_path), ReferenceAttention())
