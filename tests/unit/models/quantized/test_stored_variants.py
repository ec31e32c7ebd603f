"""Variants of the formats that published checkpoints have, and variants that are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from quantized_kit import EXAMPLES, INPUT_SCALE, Example, Stored, awq, fp8, gptq, packed_integers
from torch import Tensor

from octavo.core.errors import ConfigError, ModelFileError
from octavo.models.load.checkpoint import Checkpoint
from octavo.models.load.quantized.table import dequantizing, method_of, rounds_activations
from octavo.models.load.tensors import TensorCheckpoint
from octavo.nn.weights import Index, TensorSpec

ROWS, COLUMNS = 64, 128


def written(example: Example) -> tuple[Stored, Tensor]:
    torch.manual_seed(0)
    return example.write(torch.randn(ROWS, COLUMNS))


def view_of(stored: Stored, settings: dict[str, Any]) -> Checkpoint:
    tensors = {f"a.proj.{suffix}": tensor for suffix, tensor in stored.items()}
    view = dequantizing(TensorCheckpoint(tensors), {"quantization_config": settings})
    assert view.names() == {"a.proj.weight"}
    return view


def values_of(stored: Stored, settings: dict[str, Any], index: Index | None = None) -> Tensor:
    return view_of(stored, settings).tensor("a.proj.weight", TensorSpec((ROWS, COLUMNS), torch.float32), index).double()


@pytest.mark.parametrize("bits", [3, 4, 8])
def test_symmetric_gptq_with_zero_points_of_version_2(bits: int) -> None:
    """The configuration names version 1, whose zero points would be one larger."""
    stored, exact = written(gptq(bits, 32, version=2))
    torch.testing.assert_close(values_of(stored, gptq(bits, 32).settings), exact)


def test_asymmetric_gptq_has_the_version_of_its_configuration() -> None:
    stored, _ = written(gptq(4, 32, version=2))
    values = values_of(stored, gptq(4, 32, symmetric=False).settings)
    torch.testing.assert_close(values, values_of(stored, gptq(4, 32, version=2).settings) - steps(stored))


def steps(stored: Stored) -> Tensor:
    """Each weight's scale."""
    return stored["scales"].T.double().repeat_interleave(32, 1)


def test_gptq_with_the_older_name_of_its_version() -> None:
    example = gptq(4, 32, version=2, symmetric=False)
    stored, exact = written(example)
    settings = {**example.settings, "format": "gptq_v2"}
    del settings["checkpoint_format"]
    torch.testing.assert_close(values_of(stored, settings), exact)


@pytest.mark.parametrize("part", [None, (slice(0, 32), slice(64, 128))], ids=["whole", "part"])
def test_gptq_groups_that_are_all_zero_are_in_order(part: Index | None) -> None:
    example = EXAMPLES["gptq-4"]
    stored, exact = written(example)
    stored["g_idx"].zero_()
    values = values_of(stored, example.settings, part)
    torch.testing.assert_close(values, exact if part is None else exact[part])


@pytest.mark.parametrize("part", [None, (slice(0, 32), slice(64, 128))], ids=["whole", "part"])
@pytest.mark.parametrize("name", ["nvfp4-modelopt", "fp8-modelopt"])
def test_a_factor_of_inputs_is_part_of_the_weights(name: str, part: Index | None) -> None:
    """ModelOpt's AWQ divides weights by it."""
    stored, exact = written(EXAMPLES[name])
    stored["pre_quant_scale"] = torch.rand(COLUMNS) + 0.5
    values = values_of(stored, EXAMPLES[name].settings | {"quant_algo": "NVFP4_AWQ"}, part)
    expected = exact * stored["pre_quant_scale"].double()
    torch.testing.assert_close(values, expected if part is None else expected[part], rtol=1e-6, atol=1e-9)


def test_a_factor_of_inputs_must_have_one_number_for_each() -> None:
    stored, _ = written(EXAMPLES["nvfp4-modelopt"])
    stored["pre_quant_scale"] = torch.ones(COLUMNS - 1)
    with pytest.raises(ModelFileError, match=r"a\.proj\.pre_quant_scale .* is float32 \[127\], not .* \[128\]"):
        values_of(stored, EXAMPLES["nvfp4-modelopt"].settings)


def transforms(*locations: str) -> dict[str, Any]:
    """compressed-tensors' transforms, applied at these locations."""
    apply = [{"targets": ["re:.*down_proj$"], "location": location} for location in locations]
    return {"transform_config": {"config_groups": {"R4": {"type": "hadamard", "apply": apply}}}}


def test_transforms_of_weights_are_part_of_the_stored_ones() -> None:
    stored, exact = written(EXAMPLES["w4a16"])
    settings = EXAMPLES["w4a16"].settings | transforms("weight_input", "weight_output")
    torch.testing.assert_close(values_of(stored, settings), exact)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "ModelOpt's integers": (
        {"quant_method": "modelopt", "quant_algo": "W4A16_AWQ"},
        r"quant_algo is 'W4A16_AWQ'; Octavo reads FP8",
    ),
    "ModelOpt's integers in some layers": (
        {
            "quant_method": "modelopt",
            "quant_algo": "MIXED_PRECISION",
            "quantized_layers": {"a.proj": {"quant_algo": "W4A8_AWQ"}},
        },
        r"quantized_layers.a.proj.quant_algo is 'W4A8_AWQ'",
    ),
    "rotations of activations": (
        EXAMPLES["w4a16"].settings | transforms("weight_input", "input"),
        r"transform_config.config_groups.R4 is applied at 'input'; Octavo has no transforms of activations",
    ),
    "AutoRound's rotations": (
        EXAMPLES["auto-round"].settings | {"rotation_config": {"hadamard_type": "hadamard"}},
        r"rotation_config is .*; Octavo has no rotations of activations",
    ),
    "sparse weights": (
        EXAMPLES["w8a8"].settings | {"sparsity_config": {"format": "sparse-24-bitmask"}},
        r"sparsity_config.format is 'sparse-24-bitmask'; Octavo reads no sparse weights",
    ),
    "Marlin's layout": (
        EXAMPLES["gptq-4"].settings | {"checkpoint_format": "marlin"},
        r"checkpoint_format is 'marlin'; Octavo reads gptq and gptq_v2 of GPTQ",
    ),
    "Marlin's layout by its older setting": (
        {"quant_method": "gptq", "bits": 4, "is_marlin_format": True},
        r"checkpoint_format is 'marlin'",
    ),
    "AutoRound's SpinQuant": (
        EXAMPLES["auto-round"].settings | {"spinquant_config": {"r1": True}},
        r"spinquant_config is .*; Octavo has no rotations",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_form_that_is_not_read_is_refused(what: str) -> None:
    settings, says = REFUSED[what]
    with pytest.raises(ConfigError, match=rf"quantization_config\.{says}.* Serve another checkpoint of the model"):
        method_of({"quantization_config": settings})


def renamed(stored: Stored, names: dict[str, str]) -> Stored:
    return {names.get(suffix, suffix): tensor for suffix, tensor in stored.items()}


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)], ids=str)
def test_transformers_stores_one_scale_under_the_name_of_tiles(shape: tuple[int, ...]) -> None:
    stored, exact = written(EXAMPLES["fp8-static"])
    stored = renamed(stored, {"weight_scale": "weight_scale_inv", "input_scale": "activation_scale"})
    stored["weight_scale_inv"] = stored["weight_scale_inv"].view(shape)
    settings = EXAMPLES["fp8-static"].settings | {"weight_block_size": None}
    torch.testing.assert_close(values_of(stored, settings), exact, rtol=1e-6, atol=1e-9)
    blocks = view_of(stored, settings).blocks("a.proj.weight", codes=True)
    assert blocks is not None
    assert blocks.input_scale is not None
    assert blocks.input_scale() == pytest.approx(INPUT_SCALE)


@pytest.mark.parametrize("method", ["fp8", "modelopt"])
@pytest.mark.parametrize("stored_as", [(2, 128), (2, 1, 128, 1)], ids=str)
@pytest.mark.parametrize("part", [None, (slice(0, 128), slice(None))], ids=["whole", "part"])
def test_as_many_scales_of_tiles_as_outputs(method: str, stored_as: tuple[int, ...], part: Index | None) -> None:
    stored, exact = fp8("tiles", method="modelopt").write(torch.randn(256, 128 * 128))
    stored["weight_scale"] = stored["weight_scale"].view(stored_as)
    settings = {"quant_method": method, "quant_algo": "FP8_PB_WO", "weight_block_size": [128, 128]}
    values = view_of(stored, settings).tensor("a.proj.weight", TensorSpec(tuple(exact.shape), torch.float32), part)
    torch.testing.assert_close(values.double(), exact if part is None else exact[part], rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("name", ["fp8-channel", "fp8-compressed"])
def test_scales_of_outputs_have_a_known_shape(name: str) -> None:
    stored, exact = written(EXAMPLES[name])
    stored["weight_scale"] = stored["weight_scale"].view(ROWS)
    torch.testing.assert_close(values_of(stored, EXAMPLES[name].settings), exact, rtol=1e-6, atol=1e-9)
    stored["weight_scale"] = stored["weight_scale"].view(8, 8)
    with pytest.raises(ModelFileError, match=r"a\.proj\.weight_scale .* is float32 \[8, 8\]; "):
        values_of(stored, EXAMPLES[name].settings)


@pytest.mark.parametrize("nested", ["text_config", "llm_config"])
@pytest.mark.parametrize("name", ["fp8-channel", "w8a8"])
def test_settings_may_be_those_of_the_text_model(name: str, nested: str) -> None:
    stored, exact = written(EXAMPLES[name])
    config = {"architectures": ["X"], nested: {"quantization_config": EXAMPLES[name].settings}}
    view = dequantizing(TensorCheckpoint({f"a.{suffix}": tensor for suffix, tensor in stored.items()}), config)
    values = view.tensor("a.weight", TensorSpec((ROWS, COLUMNS), torch.float32))
    torch.testing.assert_close(values.double(), exact, rtol=1e-6, atol=1e-9)
    assert rounds_activations(config)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("bnb-nf4", {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}),
        ("bnb-int8", {"load_in_8bit": True}),
        ("fp8-channel", {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}),
        ("auto-round", EXAMPLES["auto-round"].settings | {"quant_method": "intel/auto-round"}),
    ],
)
def test_other_names_of_a_method(name: str, settings: dict[str, Any]) -> None:
    stored, exact = written(EXAMPLES[name])
    if name == "fp8-channel":
        stored["input_scale_ub"] = torch.tensor([1200.0])
    torch.testing.assert_close(values_of(stored, settings), exact, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("part", [None, (slice(0, 32), slice(64, 128))], ids=["whole", "part"])
@pytest.mark.parametrize(("bits", "stated"), [(4, 2), (8, 4), (3, 4)])
def test_a_module_of_other_bits_without_groups_of_inputs(bits: int, stated: int, part: Index | None) -> None:
    stored, exact = written(gptq(bits, 64))
    del stored["g_idx"]
    values = values_of(stored, gptq(stated, 64).settings, part)
    torch.testing.assert_close(values, exact if part is None else exact[part])


def test_zero_points_of_no_number_of_bits() -> None:
    stored, _ = written(gptq(4, 64))
    del stored["g_idx"]
    stored["qzeros"] = stored["qzeros"][:, :-1]
    with pytest.raises(ModelFileError, match=r"a\.proj\.qzeros .* has 7 words for 64 integers, which is no"):
        values_of(stored, gptq(4, 64).settings)


@pytest.mark.parametrize("part", [None, (slice(0, 32), slice(64, 128))], ids=["whole", "part"])
def test_an_awq_module_of_another_group_size(part: Index | None) -> None:
    stored, exact = written(awq(32, "gemm"))
    values = values_of(stored, awq(64, "gemm").settings, part)
    torch.testing.assert_close(values, exact if part is None else exact[part])


@pytest.mark.parametrize("inputs", [8, 24])
def test_few_inputs_have_the_bits_that_the_configuration_states(inputs: int) -> None:
    """8 inputs of 7 and of 8 bits take two words."""
    example = packed_integers(8, inputs)
    stored, exact = example.write(torch.randn(ROWS, inputs))
    values = view_of(stored, example.settings).tensor("a.proj.weight", TensorSpec((ROWS, inputs), torch.float32))
    torch.testing.assert_close(values.double(), exact)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [(-1, 1), (1, -1)], ids=str)
def test_bytes_of_bitsandbytes_in_any_storage(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    stored, exact = written(EXAMPLES["bnb-nf4"])
    stored["weight"] = stored["weight"].flatten().view(dtype).view(shape)
    values = values_of(stored, EXAMPLES["bnb-nf4"].settings)
    torch.testing.assert_close(values, exact, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_dense_weights_are_read_as_they_are(dtype: torch.dtype) -> None:
    example = EXAMPLES["w8a8"]
    stored, exact = written(example)
    stored["weight"] = exact.to(dtype)
    values = values_of(stored, example.settings | {"format": "dense"})
    assert torch.equal(values, exact.to(dtype).double())
    with pytest.raises(ModelFileError, match=r"a\.proj\.weight .* not int8"):
        values_of(stored, example.settings)


def test_autoround_has_no_version_of_gptq() -> None:
    stored, exact = written(EXAMPLES["auto-round"])
    torch.testing.assert_close(values_of(stored, EXAMPLES["auto-round"].settings | {"checkpoint_format": "x"}), exact)
