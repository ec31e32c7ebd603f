"""The self-check: wrong kernels, scales and values of packed weights end the start; right ones pass."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from test_gpt_oss_golden import store_experts_in_mxfp4
from test_quantized_golden import quantize
from tiny import load_model, make_checkpoint, model_files
from torch import Tensor

from octavo import LLM
from octavo.core.errors import SelfCheckError
from octavo.hub.files import ModelFiles
from octavo.models.load import open_checkpoint
from octavo.models.load.arranged import arranged
from octavo.models.load.checkpoint import Checkpoint
from octavo.models.load.weights import wanted_bytes, weight_layers
from octavo.models.native import NativeDecoder
from octavo.models.registry import spec_of
from octavo.native.builder import ProgramBuilder
from octavo.native.program import Pool
from octavo.nn.attention.native import NativeAttention
from octavo.nn.attention.reference import ReferenceAttention
from octavo.nn.experts import ExpertLayer
from octavo.nn.linear import Projection
from octavo.nn.quant import blocks
from octavo.nn.quant.blocks import BlockQuantized
from octavo.nn.quant.online import ONLINE
from octavo.nn.rope import Rope
from octavo.nn.weights import QuantizedBlocks
from octavo.parallel.mesh import Mesh
from octavo.worker import self_check
from octavo.worker.self_check import check_products


@pytest.fixture(scope="module", params=["gptq-4", "awq-gemm", "gptq-4-act-order", "w8a8"])
def files(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ModelFiles:
    folder = tmp_path_factory.mktemp("self_check")
    quantize(folder, make_checkpoint("quantized", folder), request.param)
    return model_files(folder)


def named(files: ModelFiles) -> Checkpoint:
    return arranged(open_checkpoint(files), spec_of(files.config))


def native(files: ModelFiles, activation_dtype: str = "int16") -> NativeDecoder:
    attention = NativeAttention(Pool(1))
    return NativeDecoder(load_model(files, attention, scheme=BlockQuantized), attention.pool, activation_dtype)


@pytest.mark.parametrize("activation_dtype", ["int16", "int8", "bfloat16"])
def test_every_form_of_weights_is_checked(
    activation_dtype: str, files: ModelFiles, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    model = native(files, activation_dtype)
    check_products(model, named(files), everything=True)
    forms = {one.packed_as for one in model.source.modules() if isinstance(one, Projection)}
    assert len(forms) == 2, "the head is not quantized"
    assert f"self-check: {len(forms)} forms of weights" in caplog.text
    for form in forms:
        assert str(form) in caplog.text


def test_a_model_without_packed_weights_logs_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    make_checkpoint("llama", tmp_path)
    files = model_files(tmp_path)
    check_products(load_model(files, ReferenceAttention()), named(files), everything=True)
    assert "self-check" not in caplog.text


def test_products_of_every_layer_are_those_of_the_dequantized_weights(files: ModelFiles) -> None:
    """Gates, whose outputs alternate, included."""
    model, checkpoint = native(files), named(files)
    for product in self_check._products(model):
        assert self_check._deviation(product, checkpoint) < 0.01


@pytest.fixture(params=["gpt-oss", "mixtral"])
def experts(request: pytest.FixtureRequest, tmp_path: Path) -> ModelFiles:
    """gpt-oss's experts in MXFP4; others in float32, with a size that panels of 16 outputs don't divide."""
    if request.param == "gpt-oss":
        make_checkpoint("gpt-oss", tmp_path, {"intermediate_size": 32, "num_hidden_layers": 1})
        store_experts_in_mxfp4(tmp_path)
    else:
        make_checkpoint("mixtral", tmp_path, {"intermediate_size": 24})
    return model_files(tmp_path)


def test_experts_are_checked(
    experts: ModelFiles, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    model, checkpoint = native(experts), named(experts)
    check_products(model, checkpoint, everything=False)
    form = "4-bit codes" if experts.config["model_type"] == "gpt_oss" else "float32"
    assert f"{form} of experts" in caplog.text
    layer = next(one for one in model.source.modules() if isinstance(one, ExpertLayer))
    for matrices in (layer.packed.expand, layer.packed.reduce):
        matrices[0].weight.view(torch.uint8)[0].fill_(0x31)
    with pytest.raises(SelfCheckError, match=rf"\.experts\.0\.\w+_proj\.weight.*, stored as {form} of experts"):
        check_products(model, checkpoint, everything=False)


def wrong_scales(weight: QuantizedBlocks) -> Tensor:
    scales = weight.scales.clone()
    scales[:, 1] *= 2
    return PACK(replace(weight, scales=scales))


def swapped_values(weight: QuantizedBlocks) -> Tensor:
    return PACK(replace(weight, values=weight.values.flip(1)))


PACK = blocks.pack_blocks
ADD = ProgramBuilder.add


def shifted(self: ProgramBuilder, *args: Any, zero_point: int = 0, **fields: Any) -> None:
    """As kernels that subtract another zero point."""
    ADD(self, *args, zero_point=zero_point + 2 if zero_point else 0, **fields)


@pytest.mark.parametrize("pack", [wrong_scales, swapped_values])
def test_wrong_weights_are_found(pack: Any, files: ModelFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "pack_blocks", pack)
    model = native(files)
    with pytest.raises(SelfCheckError, match=r"products of model\.layers\.\d.*, stored as .-bit integers"):
        check_products(model, named(files), everything=False)


def test_large_layers_are_left_out_by_default(
    files: ModelFiles, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(blocks, "pack_blocks", wrong_scales)
    monkeypatch.setattr(self_check, "AFFORDABLE", 100)
    model = native(files)
    check_products(model, named(files), everything=False)
    assert "are too large; --self-check checks them" in caplog.text
    with pytest.raises(SelfCheckError):
        check_products(model, named(files), everything=True)


@pytest.fixture
def gptq(tmp_path: Path) -> Path:
    quantize(tmp_path, make_checkpoint("quantized", tmp_path), "gptq-4-asymmetric")
    return tmp_path


def test_an_engine_with_a_wrong_kernel_does_not_start(gptq: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"device": "cpu", "kv_cache_memory_bytes": 1 << 22, "threads": 1, "skip_tokenizer_init": True}
    monkeypatch.setattr(ProgramBuilder, "add", shifted)
    with pytest.raises(SelfCheckError) as caught:
        LLM(str(gptq), **settings)
    assert "o_proj.weight, stored as 4-bit integers with minima, deviate" in str(caught.value)
    assert "--dtype float32 or bfloat16" in str(caught.value)
    assert "--no-self-check" in str(caught.value)
    with LLM(str(gptq), **settings, self_check=False):
        pass


def packed_on_gpu(files: ModelFiles, mesh: Mesh) -> Any:
    from octavo.nn.quant.packed_gpu import PackedOnGpu

    return load_model(files, ReferenceAttention(), scheme=PackedOnGpu, mesh=mesh)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the model is loaded into host memory")
@pytest.mark.parametrize("mesh", [Mesh(), Mesh(1, 2)], ids=["one", "the second of two"])
def test_packed_weights_of_a_gpu_are_checked(mesh: Mesh, gptq: Path) -> None:
    """In Triton's interpreter."""
    pytest.importorskip("triton")
    model = packed_on_gpu(model_files(gptq), mesh)
    check_products(model, named(model_files(gptq)), everything=False)
    for layer in model.modules():
        if isinstance(layer, Projection) and layer.packed_as:
            layer.scheme.matrix.scales.mul_(1.2)
    with pytest.raises(SelfCheckError, match="stored as 4-bit integers with minima"):
        check_products(model, named(model_files(gptq)), everything=False)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the model is loaded into host memory")
@pytest.mark.parametrize(("name", "form"), [("bnb-nf4", "4-bit codes"), ("mxfp8", "E4M3")])
def test_packed_codes_of_a_gpu_are_checked(name: str, form: str, tmp_path: Path) -> None:
    pytest.importorskip("triton")
    quantize(tmp_path, make_checkpoint("quantized", tmp_path), name)
    files = model_files(tmp_path)
    model = packed_on_gpu(files, Mesh())
    check_products(model, named(files), everything=False)
    for layer in model.modules():
        if isinstance(layer, Projection) and layer.packed_as:
            layer.scheme.matrix.scales.mul_(1.2)
    with pytest.raises(SelfCheckError, match=f"stored as {form}"):
        check_products(model, named(files), everything=False)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the model is loaded into host memory")
@pytest.mark.parametrize("method", ONLINE)
def test_weights_that_are_rounded_at_load_may_deviate_by_the_rounding(method: str, tmp_path: Path) -> None:
    pytest.importorskip("triton")
    from functools import partial

    from octavo.nn.quant.packed_gpu import PackedOnGpu

    make_checkpoint("quantized", tmp_path)
    model = load_model(model_files(tmp_path), ReferenceAttention(), scheme=partial(PackedOnGpu, online=ONLINE[method]))
    kept = sum(layer.nbytes for layer in weight_layers(model) if not isinstance(layer, Rope))
    assert kept <= wanted_bytes(model) < 1.05 * kept
    check_products(model, named(model_files(tmp_path)), everything=False)
    for layer in model.modules():
        if isinstance(layer, Projection) and layer.packed_as:
            layer.scheme.matrix.scales.mul_(2)
    with pytest.raises(SelfCheckError):
        check_products(model, named(model_files(tmp_path)), everything=False)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the model is loaded into host memory")
@pytest.mark.parametrize("mesh", [Mesh(), Mesh(1, 2)], ids=["one", "the second of two"])
def test_packed_experts_of_a_gpu_are_checked(mesh: Mesh, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """By the kernels of few and of several tokens, in Triton's interpreter."""
    pytest.importorskip("triton")
    caplog.set_level(logging.INFO)
    make_checkpoint("gpt-oss", tmp_path, {"intermediate_size": 128, "num_hidden_layers": 1})
    store_experts_in_mxfp4(tmp_path)
    files = model_files(tmp_path)
    model = packed_on_gpu(files, mesh)
    check_products(model, named(files), everything=False)
    assert "4-bit floats of experts" in caplog.text
    (layer,) = [one for one in model.modules() if isinstance(one, ExpertLayer)]
    for product in layer.scheme.both:
        product.scales.mul_(1.2)
    with pytest.raises(SelfCheckError, match=r"experts\.0\.\w+_proj\.weight.*, stored as 4-bit floats of experts"):
        check_products(model, named(files), everything=False)
