"""gpt-oss's experts as it publishes them, in MXFP4."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from paged import PagedRunner
from quantized_kit import mxfp4_experts
from safetensors.torch import load_file, save_file
from tiny import load_model, make_checkpoint, model_files, reference_of
from torch import Tensor

from octavo.models.model import Model
from octavo.models.native import NativeDecoder
from octavo.native.bindings import Dtype
from octavo.native.program import Pool
from octavo.nn.attention.native import NativeAttention
from octavo.nn.experts import ExpertLayer
from octavo.nn.quant.blocks import BlockQuantized

SIZE = {"intermediate_size": 32, "num_hidden_layers": 1}


def test_experts_in_mxfp4_are_those_they_expand_to(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("plain", "packed")]
    for folder in folders:
        make_checkpoint("gpt-oss", folder, SIZE)
    plain_tensors = load_file(folders[0] / "model.safetensors")
    save_file(plain_tensors | store_experts_in_mxfp4(folders[1]), folders[0] / "model.safetensors")
    plain, packed = (_logits(folder) for folder in folders)
    assert plain.isfinite().all()
    torch.testing.assert_close(packed, plain, rtol=0, atol=0)
    attention = NativeAttention(Pool(2))
    native = NativeDecoder(load_model(model_files(folders[1]), attention, scheme=BlockQuantized), attention.pool)
    experts = [layer.packed for layer in native.source.modules() if isinstance(layer, ExpertLayer)]
    assert all(one.dtypes == {Dtype.CODE4} for one in experts), "they stay packed"
    torch.testing.assert_close(_logits_of(native), plain, rtol=1e-4, atol=1e-4)


def store_experts_in_mxfp4(folder: Path) -> dict[str, Tensor]:
    """Rewrite a checkpoint of gpt-oss with random experts; return their values."""
    tensors, values = load_file(folder / "model.safetensors"), {}
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = tensors.pop(name).shape
        stored, exact = mxfp4_experts(experts, outputs, inputs)
        values[name] = exact.float().contiguous()
        tensors |= {name + suffix: tensor for suffix, tensor in stored.items()}
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "mxfp4"}}))
    return values


def _logits(folder: Path) -> Tensor:
    files = model_files(folder)
    return _logits_of(load_model(files, reference_of(files)))


def _logits_of(model: Model) -> Tensor:
    runner = PagedRunner(model, num_blocks=4, block_size=16)
    return runner.step([runner.row(range(1, 31), 32)], [30], all_logits=True)
