"""Static scales of activations: which checkpoints have them, what is refused, and what becomes of several."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from quantized_kit import EXAMPLES, INPUT_SCALE
from torch import Tensor

pytest.importorskip("triton")

from octavo.core.errors import ModelFileError
from octavo.models.load.quantized.table import dequantizing, has_input_scales
from octavo.models.load.quantized.view import QuantizedCheckpoint
from octavo.models.load.tensors import TensorCheckpoint
from octavo.nn.experts_spec import ExpertsForm
from octavo.nn.ops.floats import Floats
from octavo.nn.quant.blocks import BlockQuantized
from octavo.nn.quant.packed_gpu import PackedOnGpu
from octavo.nn.weights import QuantizedBlocks, TensorSpec

CPU = torch.device("cpu")
STATIC = ("fp8-static", "fp8-compressed-static", "fp8-modelopt-static")
SIZE = 256
SPEC = TensorSpec((SIZE, SIZE), torch.float32)
PARTS = {
    "all": None,
    "outputs": (slice(128, 256), slice(None)),
    "inputs": (slice(None), slice(0, 64)),
}


def view_of(name: str, settings: dict[str, Any] | None = None, **changes: Tensor | None) -> QuantizedCheckpoint:
    """A checkpoint of a module "a.proj"; `changes`: suffix -> tensor, None for one that is missing."""
    stored, _ = EXAMPLES[name].write(torch.randn(SIZE, SIZE) / 16)
    merged = {**stored, **changes}
    tensors = {f"a.proj.{suffix}": tensor for suffix, tensor in merged.items() if tensor is not None}
    config = {"quantization_config": {**EXAMPLES[name].settings, **(settings or {})}}
    view = dequantizing(TensorCheckpoint(tensors), config)
    assert isinstance(view, QuantizedCheckpoint)
    return view


def blocks_of(view: QuantizedCheckpoint, index: Any = None) -> QuantizedBlocks:
    blocks = view.blocks("a.proj.weight", codes=True, index=index)
    assert blocks is not None
    return blocks


def packed(parts: list[QuantizedBlocks]) -> PackedOnGpu:
    layer = PackedOnGpu(torch.float32, CPU, rounds=True)
    layer.prepare([{"weight": part} for part in parts])
    assert isinstance(layer.matrix, Floats)
    return layer


@pytest.mark.parametrize("where", PARTS)
@pytest.mark.parametrize("name", STATIC)
def test_a_rank_has_the_scale_of_the_whole(name: str, where: str) -> None:
    view, index = view_of(name), PARTS[where]
    for blocks in (blocks_of(view, index=index), blocks_of(view).part(index or (slice(None), slice(None)))):
        layer = packed([blocks])
        assert layer.packed_as == "8-bit floats, static inputs"
        assert layer.inverse is not None
        assert layer.joint is not None
        torch.testing.assert_close(layer.inverse, torch.tensor([1 / INPUT_SCALE]), rtol=2e-7, atol=0)
        torch.testing.assert_close(layer.joint, layer.scales * INPUT_SCALE, rtol=2e-7, atol=0)
        sizes = [one.nbytes for one in (layer.codes, layer.scales, layer.joint) if one is not None]
        assert layer.nbytes == sum(sizes) + 4


@pytest.mark.parametrize("name", STATIC)
def test_fused_projections_have_the_largest_scale(name: str) -> None:
    layer = packed([blocks_of(view_of(name, input_scale=torch.tensor([scale]))) for scale in (0.5, 2.0, 1.0)])
    assert layer.inverse is not None
    assert layer.inverse.tolist() == [0.5]


def test_a_part_without_a_scale_makes_all_dynamic() -> None:
    """As with modules that the configuration tells apart."""
    parts = [blocks_of(view_of("fp8-static")), blocks_of(view_of("fp8-tensor"))]
    layer = packed(parts)
    assert (layer.inverse, layer.joint, layer.packed_as) == (None, None, "8-bit floats")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (None, "a.proj is quantized, but what was sent lacks its tensor a.proj.input_scale"),
        (torch.tensor(0.0), "Tensor a.proj.input_scale in what was sent is 0, not a positive finite number"),
        (torch.tensor(-1.5), "is -1.5, not a positive finite number"),
        (torch.tensor(math.nan), "is nan, not a positive finite number"),
        (torch.tensor(math.inf), "is inf, not a positive finite number"),
        (torch.tensor(1e-44), "is 9.80909e-45, not a positive finite number"),
        (torch.ones(2), "Tensor a.proj.input_scale in what was sent is float32 [2], not one floating-point number"),
        (torch.ones(0), "is float32 [0], not one floating-point number"),
        (torch.tensor(1), "is int64 [], not one floating-point number"),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", STATIC)
def test_a_missing_or_flawed_scale_is_refused_where_it_is_used(name: str, change: Tensor | None, says: str) -> None:
    view = view_of(name, input_scale=change)
    with pytest.raises(ModelFileError, match="Get the checkpoint again") as caught:
        packed([blocks_of(view)])
    assert says in str(caught.value)
    # Neither a CPU nor experts use it.
    cpu = BlockQuantized(torch.float32, CPU)
    cpu.prepare([{"weight": blocks_of(view)}])
    assert cpu.packed is not None
    assert view.tensor("a.proj.weight", SPEC).isfinite().all()
    form = ExpertsForm(num_experts=1, hidden_size=SIZE, size=SIZE, gated=False)
    experts = PackedOnGpu(torch.float32, CPU, rounds=True).experts(form)
    experts.prepare(0, [{"weight": blocks_of(view)}], [{"weight": blocks_of(view)}])


def group(**inputs: Any) -> dict[str, Any]:
    """`config_groups` with these settings of activations."""
    weights = {"num_bits": 8, "type": "float", "strategy": "channel"}
    activations = {"num_bits": 8, "type": "float", **inputs}
    return {"config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": activations}}}


@pytest.mark.parametrize(
    ("name", "settings", "static"),
    [
        ("fp8-static", {"activation_scheme": "dynamic"}, False),
        ("fp8-static", {"activation_scheme": None}, False),
        ("fp8-compressed-static", group(dynamic=False, strategy="tensor"), True),
        ("fp8-compressed-static", group(dynamic=False, strategy="tensor", num_bits=4), False),
        ("fp8-compressed-static", group(dynamic=False, strategy="tensor", type="int"), False),
        ("fp8-compressed-static", group(dynamic=True, strategy="token"), False),
        ("fp8-compressed-static", group(dynamic=False, strategy="channel"), False),
        ("fp8-compressed-static", group(dynamic="local", strategy="tensor"), False),
        ("fp8-compressed-static", group(), False),
        ("fp8-modelopt-static", {"quant_algo": None}, True),
        ("fp8-modelopt-static", group(dynamic=True), False),
        ("fp8-modelopt-static", group(dynamic=False), True),
    ],
    ids=str,
)
def test_the_configuration_says_whether_a_scale_is_used(name: str, settings: dict[str, Any], static: bool) -> None:
    assert (blocks_of(view_of(name, settings=settings)).input_scale is not None) == static
    if "modelopt" not in name:  # whose modules may have a scale without a word in the configuration
        assert has_input_scales({"quantization_config": {**EXAMPLES[name].settings, **settings}}) == static


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_configuration_says_whether_there_are_scales(name: str) -> None:
    assert has_input_scales({"quantization_config": EXAMPLES[name].settings}) == (name in STATIC)
    assert not has_input_scales({})


def test_transformers_has_another_name_of_it() -> None:
    view = view_of("fp8-static", input_scale=None, activation_scale=torch.tensor([0.25], dtype=torch.bfloat16))
    assert view.names() == {"a.proj.weight"}
    inverse = packed([blocks_of(view)]).inverse
    assert inverse is not None
    assert inverse.tolist() == [4.0]


def test_without_quant_algo_a_module_may_lack_it() -> None:
    view = view_of("fp8-modelopt-static", settings={"quant_algo": None}, input_scale=None)
    assert blocks_of(view).input_scale is None


@pytest.mark.parametrize("name", ["fp8-tiles", "fp8-e5m2", "w8a8", "fp8-compressed-tiles"])
def test_other_numbers_stay_dynamic(name: str) -> None:
    """Tiles, E5M2 and integers, whatever scales a checkpoint has."""
    settings: dict[str, Any] = {"activation_scheme": "static"}
    if EXAMPLES[name].settings["quant_method"] == "compressed-tensors":
        settings = {"config_groups": {"group_0": dict(EXAMPLES[name].settings["config_groups"]["group_0"])}}
        settings["config_groups"]["group_0"]["input_activations"] = {"num_bits": 8, "dynamic": False}
    view = view_of(name, settings=settings, input_scale=torch.tensor(0.5))
    layer = packed([blocks_of(view)])
    assert (layer.inverse, layer.joint) == (None, None)
