"""Each format against values computed from its specification in float64, and what is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from quantized_kit import EXAMPLES, Stored, mxfp4_experts
from safetensors.torch import load_file, save_file
from tiny import load_model, make_checkpoint, model_files
from torch import Tensor

from octavo.core.errors import ConfigError, ModelFileError
from octavo.models.load.quantized import mxfp4
from octavo.models.load.quantized.table import METHODS, dequantizing, method_of
from octavo.models.load.tensors import TensorCheckpoint
from octavo.nn.attention.reference import ReferenceAttention
from octavo.nn.quant.blocks import dequantized
from octavo.nn.weights import TensorSpec

ROWS, COLUMNS = 48, 256
SPEC = TensorSpec((ROWS, COLUMNS), torch.float32)


def checkpoint(stored: Stored, settings: dict[str, Any], joint: str = "a.proj."):
    tensors = {f"{joint}{suffix}": tensor for suffix, tensor in stored.items()}
    others = {"a.proj.bias": torch.ones(3), "a.norm.weight": torch.ones(3)}
    return dequantizing(TensorCheckpoint({**tensors, **others}), {"quantization_config": settings})


@pytest.mark.parametrize("name", EXAMPLES)
def test_values_are_those_of_the_specification(name: str) -> None:
    torch.manual_seed(len(name))
    example = EXAMPLES[name]
    stored, exact = example.write(torch.randn(ROWS, COLUMNS))
    view = checkpoint(stored, example.settings)
    assert view.names() == {"a.proj.weight", "a.proj.bias", "a.norm.weight"}
    assert view.shape("a.proj.weight") == (ROWS, COLUMNS)
    values = view.tensor("a.proj.weight", SPEC)
    assert values.dtype == torch.float32
    torch.testing.assert_close(values.double(), exact, rtol=1e-6, atol=1e-9)
    index = (slice(16, 32), slice(64, 128))
    torch.testing.assert_close(view.tensor("a.proj.weight", SPEC, index), values[index], rtol=0, atol=0)
    assert view.tensor("a.proj.weight", TensorSpec((ROWS, COLUMNS), torch.bfloat16)).dtype == torch.bfloat16
    torch.testing.assert_close(view.tensor("a.proj.bias", SPEC), torch.ones(3))


@pytest.mark.parametrize("name", EXAMPLES)
def test_integers_stay_packed_where_kernels_can_keep_them(name: str) -> None:
    example = EXAMPLES[name]
    stored, exact = example.write(torch.randn(ROWS, COLUMNS))
    view = checkpoint(stored, example.settings)
    blocks = view.blocks("a.proj.weight")
    assert (blocks is not None) == example.packs
    kept = view.blocks("a.proj.weight", codes=True)
    assert (kept is not None) == (example.packs or example.codes)
    if example.codes:
        assert kept is not None
        torch.testing.assert_close(dequantized(kept, torch.float64), exact)
    if blocks is not None:
        values = dequantized(blocks, torch.float64)
        # A minimum has the precision of float16.
        torch.testing.assert_close(values, exact, rtol=1e-3, atol=float(exact.abs().max()) * 1e-3)
        assert blocks.bits == (8 if blocks.values.max() > 15 else 4)


class Counted(TensorCheckpoint):
    """Counts the bytes of what is read."""

    nbytes = 0

    def tensor(self, name: str, spec: TensorSpec, index: Any = None) -> Tensor:
        found = super().tensor(name, spec, index)
        self.nbytes += found.nbytes
        return found


READ_WHOLE = ("bnb-", "hqq-", "torchao-")
PARTS = {
    "outputs": (slice(128, 256), slice(None)),
    "inputs": (slice(None), slice(128, 256)),
    "between tiles": (slice(64, 192), slice(None)),
}


def read_by(source: Counted, settings: dict[str, Any], index: Any) -> tuple[Tensor, Any, int]:
    """The values and the blocks of a part, and the bytes read for the blocks, or if there are none for the values."""
    view = dequantizing(source, {"quantization_config": settings})
    values = view.tensor("a.proj.weight", TensorSpec((256, 256), torch.float32), index)
    before = source.nbytes
    blocks = view.blocks("a.proj.weight", codes=True, index=index)
    return values, blocks, source.nbytes - before if blocks is not None else before


@pytest.mark.parametrize("where", PARTS)
@pytest.mark.parametrize("name", EXAMPLES)
def test_a_rank_reads_its_part_only(name: str, where: str) -> None:
    """And gets what it would get of the whole. Scales of all outputs, and numbers of groups, are read whole."""
    torch.manual_seed(len(name))
    example, index = EXAMPLES[name], PARTS[where]
    stored, _ = example.write(torch.randn(256, 256))
    tensors = {f"a.proj.{suffix}": tensor for suffix, tensor in stored.items()}
    values, blocks, most = read_by(Counted(tensors), example.settings, None)
    own, part, count = read_by(Counted(tensors), example.settings, index)
    torch.testing.assert_close(own, values[index], rtol=0, atol=0)
    if part is not None:
        assert torch.equal(dequantized(part, torch.float32), dequantized(blocks.part(index), torch.float32))
    ordered = "act-order" in name and where == "inputs"
    padded = name in ("awq-gemv",) and where == "inputs"
    odd = name in ("gptq-3", "w3a16", "gptq-3-act-order")
    tiled = "tiles" in name and where == "between tiles"
    if ordered or padded or odd or tiled or name.startswith(READ_WHOLE):
        assert count <= 2 * most
    else:
        assert count < 0.6 * most


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_part_may_be_smaller_than_a_word_or_a_group(name: str) -> None:
    torch.manual_seed(len(name))
    stored, _ = EXAMPLES[name].write(torch.randn(64, 64))
    view, spec = checkpoint(stored, EXAMPLES[name].settings), TensorSpec((64, 64), torch.float32)
    values = view.tensor("a.proj.weight", spec)
    every = slice(None)
    for index in ((slice(8, 16), every), (every, slice(8, 16)), (every, slice(32, 64)), (slice(16, 24), slice(32, 64))):
        assert torch.equal(view.tensor("a.proj.weight", spec, index), values[index])
        blocks = view.blocks("a.proj.weight", codes=True, index=index)
        if blocks is not None:
            part = dequantized(blocks, torch.float32)
            torch.testing.assert_close(part, values[index], rtol=1e-3, atol=float(values.abs().max()) * 1e-3)


def test_a_column_of_tiles_needs_no_stated_strategy() -> None:
    example = EXAMPLES["fp8-compressed-tiles"]
    stored, _ = example.write(torch.randn(256, 256))
    view, spec = checkpoint(stored, {**example.settings, "config_groups": {}}), TensorSpec((256, 256), torch.float32)
    index = (slice(None), slice(128, 256))
    assert torch.equal(view.tensor("a.proj.weight", spec, index), view.tensor("a.proj.weight", spec)[index])


@pytest.mark.parametrize("change", [{"nested_blocksize": 0}, {"nested_offset": None}, {"blocksize": -1}], ids=str)
def test_a_quantization_state_of_no_sense_is_named(change: dict[str, Any]) -> None:
    stored, _ = EXAMPLES["bnb-fp4-nested"].write(torch.randn(ROWS, COLUMNS))
    (name,) = [suffix for suffix in stored if "quant_state" in suffix]
    state = {**json.loads(bytes(stored[name].tolist())), **change}
    stored[name] = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    with pytest.raises(ModelFileError, match=rf"{name} in .* is not a quantization state in JSON"):
        checkpoint(stored, EXAMPLES["bnb-fp4-nested"].settings).tensor("a.proj.weight", SPEC)


def test_experts_in_mxfp4() -> None:
    stored, exact = mxfp4_experts(3, 32, 64)
    view = checkpoint(stored, {"quant_method": "mxfp4"}, "experts.gate_up_proj")
    assert "experts.gate_up_proj" in view.names()
    assert view.shape("experts.gate_up_proj") == (3, 64, 32)
    values = view.tensor("experts.gate_up_proj", TensorSpec((3, 64, 32), torch.float32))
    torch.testing.assert_close(values.double(), exact, rtol=1e-6, atol=0)


def test_one_expert_in_mxfp4_is_expanded_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    stored, exact = mxfp4_experts(3, 32, 64)
    view = checkpoint(stored, {"quant_method": "mxfp4"}, "experts.gate_up_proj")
    expanded: list[int] = []
    whole = mxfp4.from_e2m1
    monkeypatch.setattr(mxfp4, "from_e2m1", lambda pairs: expanded.append(len(pairs)) or whole(pairs))
    index = (slice(1, 2), slice(0, 64), slice(8, 24))
    part = view.tensor("experts.gate_up_proj", TensorSpec((3, 64, 32), torch.float32), index)
    torch.testing.assert_close(part.double(), exact[index], rtol=1e-6, atol=0)
    assert expanded == [1]


def test_a_matrix_with_nan_is_expanded() -> None:
    """As kernels would take NaN for 480."""
    stored, _ = EXAMPLES["fp8-channel"].write(torch.randn(ROWS, COLUMNS))
    stored["weight"].view(torch.uint8)[5, 7] = 0xFF
    view = checkpoint(stored, EXAMPLES["fp8-channel"].settings)
    assert view.blocks("a.proj.weight", codes=True) is None
    assert view.tensor("a.proj.weight", SPEC).isnan().sum() == 1


def test_tiny_scales_are_not_rounded_to_float16() -> None:
    stored, _ = EXAMPLES["w4a16"].write(torch.randn(ROWS, COLUMNS) * 1e-5)
    stored["weight_scale"] = torch.full_like(stored["weight_scale"], 1e-6)
    view = checkpoint(stored, EXAMPLES["w4a16"].settings)
    assert view.blocks("a.proj.weight") is None
    assert view.tensor("a.proj.weight", SPEC).abs().max() <= 8e-6


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"quant_method": "exl3"}, "quant_method is 'exl3'; Octavo reads auto-round, awq"),
        ({}, None),
        ("fp8", "quant_method is None"),
        ({"quant_method": "gptq", "bits": 5}, "bits is 5; Octavo reads GPTQ checkpoints of 2, 3, 4, 8 bits"),
        ({"quant_method": "awq", "bits": 8}, "bits=8"),
        ({"quant_method": "awq", "bits": 4, "version": "marlin"}, "version='marlin'"),
        ({"quant_method": "compressed-tensors", "format": "marlin-24"}, "format is 'marlin-24'"),
    ],
)
def test_other_methods_are_refused_by_name(settings: Any, says: str | None) -> None:
    if says is None:
        assert method_of({"quantization_config": settings}) is None
        return
    with pytest.raises(ConfigError, match="Serve another checkpoint of the model") as caught:
        method_of({"quantization_config": settings})
    assert says in str(caught.value)


WRONG_PATTERN = EXAMPLES["w4a16"].settings | {"config_groups": {"group_0": {"targets": ["re:*proj"], "weights": {}}}}


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"quant_method": "awq", "bits": 4, "group_size": 0}, "group_size is 0, not a number of inputs"),
        ({"quant_method": "awq", "bits": 4, "group_size": "128"}, "group_size is '128', not a number of inputs"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, r"weight_block_size is \[128\], not two sizes"),
        ({"quant_method": "fp8", "weight_block_size": [0, 128]}, r"weight_block_size is \[0, 128\], not two sizes"),
        (WRONG_PATTERN, r"config_groups: the target 're:\*proj' is not a regular expression"),
    ],
)
def test_a_setting_of_no_sense_is_named(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=rf"quantization_config\.{says}.*Get the checkpoint's config.json again"):
        method_of({"quantization_config": settings})


def broken(name: str, **changes: Any):
    stored, _ = EXAMPLES[name].write(torch.randn(ROWS, COLUMNS))
    for suffix, change in changes.items():
        stored[suffix] = change(stored[suffix])
    return checkpoint({key: tensor for key, tensor in stored.items() if tensor is not None}, EXAMPLES[name].settings)


@pytest.mark.parametrize(
    ("name", "changes", "says"),
    [
        ("gptq-4", {"scales": lambda _: None}, "lacks its tensor a.proj.scales"),
        (
            "gptq-4",
            {"scales": lambda it: it[:, :-1]},
            "Tensor a.proj.scales in what was sent is float16 [8, 47]",
        ),
        ("gptq-4", {"qzeros": lambda it: it[:-1]}, "a.proj.qzeros in what was sent is int32 [7, 6], not int32 [8, 6]"),
        ("gptq-4", {"qweight": lambda it: it[:-1]}, "no number of bits"),
        ("gptq-4", {"g_idx": lambda it: it + 1}, "a.proj.g_idx in what was sent does not give one of 8 groups"),
        ("gptq-4-act-order", {"g_idx": lambda _: None}, "lacks its tensor a.proj.g_idx"),
        ("awq-gemm", {"scales": lambda it: it[:-1]}, "a.proj.scales"),
        ("w4a16-act-order", {"weight_g_idx": lambda _: None}, "lacks its tensor a.proj.weight_g_idx"),
        ("w4a16-asymmetric", {"weight_zero_point": lambda _: None}, "lacks its tensor a.proj.weight_zero_point"),
        ("w8a8-asymmetric", {"weight_zero_point": lambda _: None}, "lacks its tensor a.proj.weight_zero_point"),
        ("torchao-intx", {"_weight_zero_point": lambda _: None}, "lacks its tensor a.proj._weight_zero_point"),
        ("w4a16", {"weight_packed": lambda it: it[:, :-1]}, "weight_packed in what was sent has shape [48, 31]"),
        (
            "w8a8",
            {"weight": lambda it: it.short()},
            "is int16 [48, 256], not int8 or float8_e4m3fn",
        ),
        (
            "fp8-channel",
            {"weight_scale": lambda it: it[:-1]},
            "is float32 [47, 1]; 48 outputs have [48, 1] floating-point numbers",
        ),
        ("fp8-tiles", {"weight_scale_inv": lambda it: it[:, :1]}, "tiles of 128 x 128 have [1, 2]"),
        ("bnb-nf4", {"weight.absmax": lambda it: it[:-1]}, "scales for 12288 weights"),
        (
            "bnb-nf4",
            {"weight.quant_state.bitsandbytes__nf4": lambda it: it[:-5]},
            "is not a quantization state in JSON",
        ),
        ("hqq-4", {"packing": lambda it: it[:-1]}, "Octavo reads 8bit_u8"),
        ("hqq-4", {"zero": lambda it: it[:-1]}, "a.proj.zero in what was sent is float16 [383, 1], not"),
        ("nvfp4", {"weight_global_scale": lambda _: None}, "lacks its tensor a.proj.weight_global_scale"),
        (
            "torchao-intx",
            {"_weight_scale": lambda it: it[:, :3]},
            "a.proj._weight_scale in what was sent has shape [48, 3]",
        ),
        ("torchao-int8", {"_weight_zero_point": lambda it: it[:-1]}, "a.proj._weight_zero_point"),
        ("torchao-int8", {"_weight_qdata": lambda it: it.int()}, "is torch.int32: Octavo reads torchao's Float8Tensor"),
        ("torchao-int4", {"_weight_qdata": lambda it: it.view(6, 8, 32, 4)}, "int4_packing_format='plain'"),
        ("torchao-float8", {"_weight_scale": lambda it: it[:-1]}, "has shape [47, 1] for a matrix [48, 256]"),
    ],
)
def test_what_does_not_fit_names_the_tensor(name: str, changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ModelFileError, match=r"Get the checkpoint again|Octavo reads") as caught:
        broken(name, **changes).tensor("a.proj.weight", SPEC)
    assert says in str(caught.value)


def wrong(tensor: Tensor) -> dict[str, Tensor | None]:
    """What a damaged or foreign checkpoint may have in place of a tensor."""
    found: dict[str, Tensor | None] = {
        "missing": None,
        "empty": tensor[..., :0] if tensor.dim() else tensor.new_empty(0),
    }
    found["another dtype"] = tensor.to(torch.int16) if tensor.dtype.is_floating_point else tensor.float()
    if tensor.dim() and len(tensor) > 1:
        found["a row less"] = tensor[:-1]
    if tensor.dim() == 2:
        found["one dimension"] = tensor.flatten()
        if tensor.shape[0] != tensor.shape[1] and 1 not in tensor.shape:
            found["transposed"] = tensor.T
        if tensor.shape[1] > 1:
            found["a column less"] = tensor[:, :-1]
    return found


@pytest.mark.parametrize("part", [None, "outputs", "inputs"])
@pytest.mark.parametrize("name", EXAMPLES)
def test_no_wrong_tensor_is_read_silently(name: str, part: str | None) -> None:
    """Each is refused by its name or another one's of the module, or changes nothing, or gives a matrix of a shape that
    the model refuses. So it is for a rank's part."""
    torch.manual_seed(0)
    size, index = (ROWS, COLUMNS) if part is None else (256, 256), None if part is None else PARTS[part]
    stored, exact = EXAMPLES[name].write(torch.randn(size))
    for suffix, tensor in stored.items():
        for what, replacement in wrong(tensor).items():
            parts = {**stored, suffix: replacement}
            view = checkpoint({key: part for key, part in parts.items() if part is not None}, EXAMPLES[name].settings)
            if (name, suffix, what) == ("mxfp8", "weight_scale", "another dtype"):
                continue  # the form of floats with a factor for each group
            says, values = "", None
            try:
                if view.has("a.proj.weight") and view.shape("a.proj.weight") == size:
                    values = view.tensor("a.proj.weight", TensorSpec(size, torch.float32), index)
            except ModelFileError as error:
                says = str(error)
            if says:
                assert re.search(r"a\.proj\..*(Get the checkpoint again|Octavo reads)", says), (suffix, what, says)
            elif values is not None:
                expected = exact if index is None else exact[index]
                torch.testing.assert_close(values.double(), expected, rtol=1e-2, atol=1e-2, msg=f"{suffix}, {what}")


def test_the_groups_of_a_configuration_are_told_apart() -> None:
    """Zero points are needed where the module's own group says so."""
    settings = EXAMPLES["w4a16"].settings
    weights = settings["config_groups"]["group_0"]["weights"]
    stored, exact = EXAMPLES["w4a16"].write(torch.randn(ROWS, COLUMNS))
    asymmetric = {**weights, "symmetric": False}
    for target, refused in (("re:.*proj$", True), ("a.proj", True), ("re:b.*", False)):
        groups = {
            "group_0": {"targets": ["Linear"], "weights": weights},
            "group_1": {"targets": [target], "weights": asymmetric},
        }
        view = checkpoint(stored, {**settings, "config_groups": groups})
        if refused:
            with pytest.raises(ModelFileError, match=r"lacks its tensor a\.proj\.weight_zero_point"):
                view.tensor("a.proj.weight", SPEC)
        else:
            torch.testing.assert_close(view.tensor("a.proj.weight", SPEC).double(), exact, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("order", ["group", "dynamic", True])
def test_every_name_of_an_order_by_activations_needs_groups(order: object) -> None:
    settings = json.loads(json.dumps(EXAMPLES["w4a16-act-order"].settings))
    settings["config_groups"]["group_0"]["weights"]["actorder"] = order
    stored, _ = EXAMPLES["w4a16-act-order"].write(torch.randn(ROWS, COLUMNS))
    del stored["weight_g_idx"]
    with pytest.raises(ModelFileError, match=r"lacks its tensor a\.proj\.weight_g_idx"):
        checkpoint(stored, settings).tensor("a.proj.weight", SPEC)


SCALES = ("scales", "weight_scale", "weight_scale_inv", "SCB", "weight.absmax", "scale", "_weight_scale")


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_missing_scale_is_named(name: str) -> None:
    """Values of 8 bits are not taken for weights."""
    stored, _ = EXAMPLES[name].write(torch.randn(ROWS, COLUMNS))
    (scale,) = [suffix for suffix in stored if suffix in SCALES]
    with pytest.raises(ModelFileError, match="Get the checkpoint again") as caught:
        checkpoint(
            {suffix: tensor for suffix, tensor in stored.items() if suffix != scale}, EXAMPLES[name].settings
        ).tensor("a.proj.weight", SPEC)
    assert f"a.proj.{scale.removesuffix('_inv')}" in str(caught.value)


def test_numbers_of_8_bits_need_a_quantization_config(tmp_path: Path) -> None:
    make_checkpoint("quantized", tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    name = next(name for name in weights if name.endswith("q_proj.weight"))
    save_file(weights | {name: weights[name].to(torch.float8_e4m3fn)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelFileError, match=rf"{name} in .* is torch.float8_e4m3fn, but .* no quantization_config"):
        load_model(model_files(tmp_path), ReferenceAttention())


@pytest.mark.parametrize(
    ("name", "settings", "kept", "says"),
    [
        ("gptq-4", {}, 7, "Tensor a.proj.scales in what was sent has 7 groups, which don't divide 256 inputs"),
        ("awq-gemm", {}, 7, "Tensor a.proj.scales in what was sent has 7 groups, which don't divide 256 inputs"),
        ("awq-gemv", {"group_size": 96}, 8, "has 256 inputs, which groups of 96 don't divide"),
        ("w4a16", {}, 7, "a.proj.weight_scale in what was sent has 7 groups, which don't divide 256 inputs"),
    ],
)
def test_groups_must_divide_the_inputs(name: str, settings: dict[str, Any], kept: int, says: str) -> None:
    stored, _ = EXAMPLES[name].write(torch.randn(ROWS, COLUMNS))
    stored.pop("g_idx", None)
    for suffix in ("scales", "qzeros"):
        if suffix in stored:
            stored[suffix] = stored[suffix][:kept]
    if "weight_scale" in stored:
        stored["weight_scale"] = stored["weight_scale"][:, :kept]
    with pytest.raises(ModelFileError, match="Get the checkpoint again") as caught:
        checkpoint(stored, {**EXAMPLES[name].settings, **settings}).tensor("a.proj.weight", SPEC)
    assert says in str(caught.value)


def test_each_method_has_an_example() -> None:
    assert {example.settings["quant_method"] for example in EXAMPLES.values()} | {"mxfp4"} == set(METHODS)
